"""The ASGI application: routes of all protocols behind one access check."""

from collections.abc import Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ..errors import MlxrtError
from . import anthropic, ollama, openai_chat, openai_completions, openai_responses, operation
from .access import AccessControl, AccessRules
from .answering import PreparationQueue, RunningCalls, reply
from .metrics import ServerMetrics
from .problem import WRITERS, Problem, describe, protocol_of
from .served_models import ServedModels

PAGE_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
CONTENT_POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


async def front_page(http: HttpRequest) -> Response:
    """The page for a browser; the words that Ollama's clients look for, for anything else."""
    if "text/html" in http.headers.get("accept", ""):
        return send_file("index.html")
    return PlainTextResponse("Ollama is running")


async def page_file(http: HttpRequest) -> Response:
    return send_file(http.path_params["name"])


def send_file(name: str) -> Response:
    suffix = name[name.rfind(".") :] if "." in name else ""
    if suffix not in PAGE_TYPES or "/" in name or name.startswith("."):
        raise Problem(404, "no such file", code="not_found")
    try:
        content = files("mlxrt.server").joinpath("page", name).read_bytes()
    except FileNotFoundError:
        raise Problem(404, "no such file", code="not_found") from None
    headers = {"content-security-policy": CONTENT_POLICY, "cache-control": "no-cache"}
    return Response(content, media_type=PAGE_TYPES[suffix], headers=headers)


async def embeddings(http: HttpRequest) -> Response:
    raise Problem(501, "no embedding model is served", "not_implemented", "not_implemented")


async def handle_not_found(http: HttpRequest, error: Exception) -> Response:
    return write_problem(http, Problem(404, f"there is no {http.method} {http.url.path[:120]}", code="not_found"))


async def handle_wrong_method(http: HttpRequest, error: Exception) -> Response:
    text = f"{http.url.path[:120]} does not take {http.method}"
    return write_problem(http, Problem(405, text, code="method_not_allowed"))


async def handle_error(http: HttpRequest, error: Exception) -> Response:
    return write_problem(http, describe(error))


def write_problem(http: HttpRequest, problem: Problem) -> Response:
    body = WRITERS[protocol_of(http.url.path)](problem, http.state.request_id)
    return reply(body, problem.status, problem.headers)


def list_routes() -> list[Route]:
    found = [
        Route("/", front_page, methods=["GET", "HEAD"]),
        Route("/page/{name}", page_file),
        Route("/health", operation.health),
        Route("/ready", operation.ready),
        Route("/metrics", operation.metrics),
        Route("/v1/cache", operation.show_cache),
        Route("/v1/cache", operation.clear_cache, methods=["DELETE"]),
        Route("/v1/cache/warm", operation.warm_cache, methods=["POST"]),
        Route("/v1/requests/{id}", operation.cancel, methods=["DELETE"]),
        Route("/v1/requests/{id}/cancel", operation.cancel, methods=["POST"]),
        Route("/v1/messages", anthropic.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
    ]
    openai: list[tuple[str, Callable, str]] = [
        ("/chat/completions", openai_chat.chat_completions, "POST"),
        ("/completions", openai_completions.completions, "POST"),
        ("/responses", openai_responses.responses, "POST"),
        ("/embeddings", embeddings, "POST"),
        ("/models", openai_completions.list_models, "GET"),
        ("/models/{name:path}", openai_completions.show_model, "GET"),
    ]
    for path, handler, method in openai:  # some clients leave out /v1
        found += [Route(prefix + path, handler, methods=[method]) for prefix in ("/v1", "")]
    served: list[tuple[str, Callable, str]] = [
        ("/api/chat", ollama.chat, "POST"),
        ("/api/generate", ollama.generate, "POST"),
        ("/api/tags", ollama.tags, "GET"),
        ("/api/ps", ollama.running, "GET"),
        ("/api/show", ollama.show, "POST"),
        ("/api/version", ollama.version, "GET"),
        ("/api/pull", ollama.pull, "POST"),
        *(
            (f"/api/{name}", ollama.not_implemented, "POST")
            for name in ("create", "copy", "push", "embed", "embeddings")
        ),
        ("/api/delete", ollama.not_implemented, "DELETE"),
    ]
    return found + [Route(path, handler, methods=[method]) for path, handler, method in served]


def build_app(models: ServedModels, rules: AccessRules, log_prompts: bool = False) -> AccessControl:
    app = Starlette(
        routes=list_routes(),
        exception_handlers={
            404: handle_not_found,
            405: handle_wrong_method,
            Problem: handle_error,
            MlxrtError: handle_error,
            Exception: handle_error,
        },
    )
    app.state.models, app.state.metrics, app.state.log_prompts = models, ServerMetrics(), log_prompts
    app.state.running, app.state.preparing = RunningCalls(), PreparationQueue(models.config.max_queue)
    return AccessControl(app, rules)
