"""Chat templates: Jinja from a checkpoint, run in a sandbox that limits loops, calls and memory.

Templates are untrusted code: whatever fails inside becomes a BadTemplate of one line.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..errors import BadRequest, BadTemplate

MAX_ITERATIONS = 3_000_000  # of all loops of one rendering: about a second
CALL_COST = 20  # iterations that take as long as one call
MAX_PRODUCT = 10_000_000  # characters, bits or items that one product may have


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
        self.compiled = run_guarded("cannot be read", lambda: build_sandbox().from_string(source))

    def render(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], add_generation_prompt: bool
    ) -> str:
        """The template's text; `given`: its other variables."""
        variables = {**self.names, "documents": None, **given, "messages": [dict(message) for message in messages]}
        variables["add_generation_prompt"] = add_generation_prompt
        self.compiled.environment.budget = MAX_ITERATIONS
        return run_guarded("refused the messages", lambda: self.compiled.render(variables))


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict]:
    found = check_dicts(messages, "messages", "message")
    for i, message in enumerate(found):
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"message {i} needs a role (a str such as user), not {message.get('role')!r:.40}")
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
    return " ".join(str(error).split()) or type(error).__name__


def raise_exception(message: object) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def tojson(x: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def build_sandbox():
    """The environment that chat templates expect, with a limit on loops, calls and products."""
    from jinja2 import TemplateRuntimeError, nodes, pass_environment
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training; here it only renders its content."""

        tags = {"generation"}  # noqa: RUF012  Jinja reads a class attribute

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])
        budget = MAX_ITERATIONS

        def spend(self, units: int) -> None:
            self.budget -= units
            if self.budget < 0:
                raise TemplateRuntimeError(f"it runs too long (more than {MAX_ITERATIONS:,} iterations)")

        def call(self, context, obj, *args, **kwargs):
            self.spend(CALL_COST)
            return super().call(context, obj, *args, **kwargs)

        def call_binop(self, context, operator, left, right):
            if product_size(operator, left, right) > MAX_PRODUCT:
                raise TemplateRuntimeError(f"a product of more than {MAX_PRODUCT:,} digits or items")
            return super().call_binop(context, operator, left, right)

        def _parse(self, source, name, filename):
            tree = super()._parse(source, name, filename)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
            return tree

    @pass_environment
    def counted(environment, items) -> Iterator:
        for item in items:
            environment.spend(1)
            yield item

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    now = lambda format: datetime.now().strftime(format)  # noqa: E731  templates may name the argument
    environment.filters.update(tojson=tojson, counted=counted)
    environment.globals.update(raise_exception=raise_exception, strftime_now=now)
    return environment


def product_size(operator: str, left: Any, right: Any) -> int:
    """The size of left * right or left ** right, in items or bits."""
    if operator == "**":
        both = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * max(right, 0) if both else 0
    if isinstance(left, int) and not isinstance(right, int):
        left, right = right, left
    sized = isinstance(left, (str, bytes, list, tuple)) and isinstance(right, int)
    return len(left) * max(right, 0) if sized else 0
