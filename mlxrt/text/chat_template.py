"""Chat templates: Jinja from a checkpoint, run in a sandbox that limits work and memory (`template_sandbox`).

Templates are untrusted code: whatever fails inside becomes a BadTemplate of one line.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..errors import BadRequest, BadTemplate, show

MAX_MESSAGE = 500  # characters of a template's own error that are shown


def select_template(templates: Mapping[str, str], tools: object) -> str:
    """The name of the template to use: `tool_use` when tools are given and it exists, else `default`."""
    if not templates:
        raise BadTemplate("this model has no chat template; give raw text (a str) instead of messages")
    if tools is not None and "tool_use" in templates:
        return "tool_use"
    if "default" in templates:
        return "default"
    raise BadTemplate(f"no chat template is named default; there are {', '.join(sorted(templates))}: give raw text")


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, names: Mapping[str, str]):
        self.names = dict(names)
        self.compiled = run_guarded("cannot be read", lambda: compile_template(source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        given: Mapping[str, Any],
        add_generation_prompt: bool,
        probing: bool = False,
    ) -> str:
        """The template's text; `given`: its other variables; `probing`: to learn what it does, with a small budget."""
        variables = {**self.names, "documents": None, **given, "messages": [dict(message) for message in messages]}
        variables["add_generation_prompt"] = add_generation_prompt
        return run_guarded("refused the messages", lambda: self._render(variables, probing))

    def _render(self, variables: dict[str, Any], probing: bool) -> str:
        from .template_sandbox import MAX_WORK, limit_rendering

        with limit_rendering(variables, MAX_WORK // 20 if probing else MAX_WORK):
            return self.compiled.render(variables)


def compile_template(source: str):
    from .template_sandbox import MAX_WORK, Sandbox, limit_work

    environment = Sandbox()
    environment.globals["strftime_now"] = strftime_now
    with limit_work(MAX_WORK):  # constants are computed when a template is compiled
        return environment.from_string(source)


def strftime_now(format: str) -> str:
    if len(format) > MAX_MESSAGE:
        raise ValueError(f"a format of {len(format):,} characters")
    return datetime.now().strftime(format)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict]:
    found = check_dicts(messages, "messages", "message")
    for i, message in enumerate(found):
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"message {i} needs a role (a str such as user), not {show(message.get('role'))}")
    return found


def check_dicts(values: Sequence[Mapping[str, Any]], what: str, one: str) -> list[dict]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise BadRequest(f"{what} must be a list of dicts, not {type(values).__name__}")
    found = list(values)
    for i, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise BadRequest(f"{one} {i} must be a dict, not {type(row).__name__}")
    return [dict(row) for row in found]


def run_guarded(what: str, work):
    """Compile or render a template; it may raise anything, since it calls methods of our data."""
    from jinja2 import TemplateError

    try:
        return work()
    except TemplateError as e:
        raise BadTemplate(f"the chat template {what}: {one_line(e)}") from None
    except RecursionError:
        raise BadTemplate(f"the chat template {what}: it nests too deeply") from None
    except MemoryError:
        raise BadTemplate(f"the chat template {what}: it needs too much memory") from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, SyntaxError, RuntimeError) as e:
        raise BadTemplate(f"the chat template {what}: {type(e).__name__}: {one_line(e)}") from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_MESSAGE] or type(error).__name__
