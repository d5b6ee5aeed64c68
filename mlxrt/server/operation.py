"""For whoever runs the server: health, readiness, metrics, the prefix cache, cancelling a request."""

import asyncio
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from ..engine.async_engine import AsyncEngine
from ..engine.request import Request, SamplingParams
from .answering import Call, begin, collect, open_call, read_body, reply, unless_disconnected
from .problem import Problem


async def health(http: HttpRequest) -> Response:
    """Fails once an engine has failed: a server that cannot answer must not look alive."""
    failure = http.app.state.models.failure
    return reply({"status": "failed", "error": str(failure)}, 503) if failure else reply({"status": "ok"})


async def ready(http: HttpRequest) -> Response:
    models = http.app.state.models
    if models.failure or models.closing or models.starting:
        return reply({"status": "loading" if models.starting else "unavailable"}, 503)
    return reply({"status": "ready"})


async def metrics(http: HttpRequest) -> Response:
    engines = {m.name: m.engine for m in http.app.state.models.models.values() if m.engine is not None}
    stats = await asyncio.gather(*(engine.stats() for engine in engines.values()))
    text = http.app.state.metrics.write(dict(zip(engines, stats)))
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def show_cache(http: HttpRequest) -> Response:
    """Counts and sizes, never texts."""
    found = {}
    for model in http.app.state.models.models.values():
        if model.engine is not None:
            s = await model.engine.stats()
            found[model.name] = {
                "nodes": s.stored_nodes,
                "bytes": s.kv_stored,
                "limit": s.kv_limit,
                "hits": s.hits,
                "misses": s.misses,
                "reused_tokens": s.reused_tokens,
                "evictions": s.evictions,
                "disk": None if s.disk is None else {"records": s.disk.records, "bytes": s.disk.nbytes},
            }
    return reply({"object": "list", "models": found})


async def clear_cache(http: HttpRequest) -> Response:
    cleared = {}
    for model in http.app.state.models.models.values():
        if model.engine is not None:
            cleared[model.name] = await asyncio.to_thread(model.engine.engine.clear_prefix_cache)
    return reply({"cleared": cleared})


async def warm_cache(http: HttpRequest) -> Response:
    """Compute a conversation's prefix now, so that the first question about it is answered at once.

    It is a request like any other, for one token: it is refused where it does not fit, it shares the steps with
    everybody's answers, and it ends when its client leaves.
    """
    body = await read_body(http)
    messages, prompt = body.items("messages"), body.text("prompt")
    if (messages is None) == (prompt is None):
        raise Problem(400, "give either messages or prompt")
    given: dict[str, Any] = {"messages": tuple(messages)} if messages is not None else {"prompt": prompt}

    def make(engine: AsyncEngine) -> Call:
        body.finish()
        return Call([Request(**given, params=SamplingParams(max_tokens=1))], stream=False)

    opened = await open_call(http, body.text("model"), make)
    async with opened.leave:
        ids = await begin(http, opened.stream)
        await unless_disconnected(http, collect(opened.stream, ids, http.app.state.metrics.record))
        [request], inner = opened.call.requests, opened.engine.engine
        tokens = await asyncio.to_thread(inner.encode, request)
        state = await asyncio.to_thread(inner.state, tokens, request.cache_salt)
    return reply({"tokens": len(tokens), "cached": 0 if state is None else len(state)})


async def cancel(http: HttpRequest) -> Response:
    """End the requests with the id that their responses carry in x-request-id. Where keys are isolated, those of the
    same key only: a client chooses its ids, so another could guess them."""
    wanted = http.path_params["id"]
    calls = http.app.state.running.find(wanted, http.state.cache_salt)
    if not calls:
        raise Problem(404, f"no request {wanted[:80]!r} is running", code="request_not_found")
    for call in calls:
        for id in call.ids:
            await call.engine.cancel(id)
    return reply({"id": wanted, "cancelled": True})
