"""Writes docs/api.md from the code (python -m tests.support.api_page); tests/test_docs.py finds missing names."""

import inspect
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import mlxrt
from mlxrt.cli.flags import FLAG_HELP
from mlxrt.engine.options import EngineOptions, GenerateOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HEAD = """# API

Generated from the code by `python -m tests.support.api_page`. Everything here is importable from `mlxrt`; nothing else
is public.

`engine.generate(x)` and `engine.stream(x)` take a `str` (raw text), a list of messages (through the chat template), a
list of token ids or a `Request`; a list of any of them gives a list. Keywords are the fields of `SamplingParams` and
`Request`, those of `load` the fields of `EngineConfig`: `mlxrt.load("smollm2", kv="q8")`.
"""
OPTIONS = get_type_hints(GenerateOptions) | get_type_hints(EngineOptions)
CLASSES = {
    "Engine": "generate stream score session stats cost encode tokenizer submit stream_of step take cancel close",
    "Session": "say fork rewind save restore messages tokens summary",
    "Reply": "text completion events prompt_tokens dropped_turns stop close",
    "AsyncEngine": "load generate stream score session stats cancel close",
    "AsyncStream": "wait_submitted read read_all cancel aclose",
    "AsyncSession": "say fork rewind save restore messages tokens",
    "AsyncReply": "text completion events dropped_turns stop aclose",
    "LogitsRow": "logits logprobs top edit add ban allow tokens prompt_tokens output_tokens",
}
RECORDS = ("Request", "Event", "Completion", "ToolCall", "ToolCallDelta", "Timings", "EngineEvent", "Cost", "Stats")


def first_line(thing) -> str:
    text = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return "" if text.startswith(f"{getattr(thing, '__name__', '')}(") else text  # a dataclass' generated docstring


def members(cls: type) -> list[tuple[str, str, str]]:
    """(name, signature, docstring) of the public methods and properties."""
    found = []
    for name in dict.fromkeys(name for base in cls.__mro__[:-1] for name in vars(base)):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found.append((name, name, first_line(member)))
        elif callable(getattr(cls, name)):
            parameters = inspect.signature(getattr(cls, name)).parameters
            options = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name in OPTIONS]
            named = [p for p in parameters.values() if p.name not in ("self", *options)]
            listed = [str(p.replace(annotation=inspect.Parameter.empty)) for p in named]
            listed += ["**options"] if options else []
            call = f"{name}({', '.join(listed)})".replace("EngineConfig()", "...")
            found.append((name, call if len(call) < 100 else f"{name}(...)", first_line(getattr(cls, name))))
    return found


def show_default(field) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "`{}`" if field.default_factory is not MISSING else "required"


def lines():
    yield HEAD
    yield from (
        "## Loading",
        "",
        "`mlxrt.load(name, config=EngineConfig(), *, on_event=None, **options)` " + first_line(mlxrt.load),
        "",
    )
    for name in CLASSES:
        cls = getattr(mlxrt, name)
        yield from (f"## {name}", "", first_line(cls), "", "| | |", "|---|---|")
        rows = {member: (call, text) for member, call, text in members(cls)}
        yield from (f"| `{rows[member][0]}` | {rows[member][1]} |" for member in CLASSES[name].split())
        yield ""
    yield from ("## EngineConfig", "", "| field | default | meaning |", "|---|---|---|")
    for f in fields(mlxrt.EngineConfig):
        yield f"| `{f.name}` | {show_default(f)} | {f.metadata['help']} |"
    yield from ("", "## SamplingParams", "", first_line(mlxrt.SamplingParams), "")
    yield from ("| field | default | meaning |", "|---|---|---|")
    for f in fields(mlxrt.SamplingParams):
        yield f"| `{f.name}` | {show_default(f)} | {FLAG_HELP[f.name]} |"
    yield from ("", "## Data", "", "| class | fields | |", "|---|---|---|")
    for name in RECORDS:
        cls = getattr(mlxrt, name)
        names = [f.name for f in fields(cls)] if is_dataclass(cls) else []
        names += [n for n, _, _ in members(cls) if isinstance(inspect.getattr_static(cls, n), property)]
        yield f"| `{name}` | {', '.join(f'`{n}`' for n in names)} | {first_line(cls)} |"
    yield f"| `Finish` | {', '.join(f'`{reason}`' for reason in mlxrt.Finish)} | how a request ended |"
    yield f"| `LogitsView` | | {first_line(mlxrt.LogitsView)} |"
    yield from ("", "## Errors", "", "| error | is a | |", "|---|---|---|")
    for name in mlxrt.__all__:
        cls = getattr(mlxrt, name)
        if inspect.isclass(cls) and issubclass(cls, Exception):
            yield f"| `{name}` | {', '.join(f'`{base.__name__}`' for base in cls.__bases__)} | {first_line(cls)} |"


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
