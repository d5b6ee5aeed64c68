"""Grammars of tool calls: what a model may write so that its call names an offered tool and fits that tool's schema.

A call has its arguments as JSON, or as XML elements whose values are raw text. Formats without a grammar here (Gemma 4,
DeepSeek, Python calls, harmony) are read but not enforced.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,8}"  # unbounded, it is legal between JSON's tokens for ever


@dataclass(frozen=True)
class CallGrammar:
    """How one format writes a call: `begin`, then the body of one of the tools."""

    begin: str  # the marker in front of a call; empty where there is none
    end: str
    write_body: Callable[[str, Mapping[str, Any], bool, "RuleNames"], str]  # tool, schema, lenient -> a Lark expression
    several: bool = True  # more calls may follow the first


class RuleNames:
    """Rules that expressions refer to, each under a name of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, rule: str, attributes: str = "") -> str:
        name = f"part{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {rule}")
        return name


def write_json_body(fields: tuple[str, str], before: str, after: str):
    def write(name: str, schema: Mapping[str, Any], lenient: bool, names: RuleNames) -> str:
        head = f'{before}{{"{fields[0]}": {json.dumps(name)}, "{fields[1]}": '
        return " ".join((literal(head), names.add(json_rule(schema, lenient)), literal("}" + after)))

    return write


def write_xml_body(function: str, parameter: str, parameter_end: str, function_end: str):
    def write(name: str, schema: Mapping[str, Any], lenient: bool, names: RuleNames) -> str:
        parts = [literal("\n" + function.replace("NAME", name) + "\n")]
        required = schema.get("required") or ()
        for key, own in (schema.get("properties") or {}).items():
            value = write_xml_value(own, parameter_end, lenient, names)
            whole = f"{literal(parameter.replace('NAME', key))} {value}"
            parts.append(whole if key in required else f"({whole})?")
        return " ".join((*parts, literal(function_end)))

    return write


def write_xml_value(schema: Any, end: str, lenient: bool, names: RuleNames) -> str:
    """A string is raw text up to the end of its element, anything else is JSON."""
    if isinstance(schema, Mapping) and "enum" in schema and all(isinstance(v, str) for v in schema["enum"]):
        return f"({' | '.join(map(literal, schema['enum']))}) {literal(end)}"
    if isinstance(schema, Mapping) and schema.get("type", "string") != "string":
        return f"{names.add(json_rule(schema, lenient))} {literal(end)}"
    return names.add(r"/(.|\n)*/", f"[suffix={json.dumps(end)}]")


CALL_GRAMMARS = {
    "hermes": CallGrammar("<tool_call>", "</tool_call>", write_json_body(("name", "arguments"), "\n", "\n")),
    "smollm3": CallGrammar("<tool_call>", "</tool_call>", write_json_body(("name", "arguments"), "\n", "\n")),
    "llama3": CallGrammar("", "", write_json_body(("name", "parameters"), "", ""), several=False),
    "mistral": CallGrammar("[TOOL_CALLS]", "", write_json_body(("name", "arguments"), "[", "]"), several=False),
    "qwen3_coder": CallGrammar(
        "<tool_call>",
        "</tool_call>",
        write_xml_body("<function=NAME>", "<parameter=NAME>\n", "\n</parameter>\n", "</function>\n"),
    ),
    "minimax_m2": CallGrammar(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        write_xml_body('<invoke name="NAME">', '<parameter name="NAME">', "</parameter>\n", "</invoke>\n"),
    ),
}


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_rule(schema: Any, lenient: bool) -> str:
    options = {"whitespace_pattern": WHITE_SPACE} | ({"lenient": True} if lenient else {})
    given = dict(schema) if isinstance(schema, Mapping) and schema else {"type": "object"}
    return f"%json {json.dumps(given | {'x-guidance': options}, ensure_ascii=False)}"


def write_call_grammar(
    form: CallGrammar,
    tools: Sequence[Mapping[str, Any]],
    lenient: Mapping[str, bool],
    marker: Callable[[str], str],
    from_begin: bool,
    several: bool = True,
) -> str:
    """Lark for calls of these tools, one or `several`. `marker`: how a marker is written there; `from_begin`: with the
    first one."""
    names, bodies = RuleNames(), []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        bodies.append(form.write_body(function["name"], schema, lenient[function["name"]], names))
    begin, end = (marker(text) if text else "" for text in (form.begin, form.end))
    more = f'("\\n" {begin} body {end})*' if form.several and several and from_begin else ""
    start = f"{begin if from_begin else ''} body {end} {more}".strip()
    return "\n".join((f"start: {start}", "body: " + "\n    | ".join(bodies), *names.lines))
