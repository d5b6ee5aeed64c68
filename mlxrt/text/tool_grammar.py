"""Grammars of tool calls: what a model may write so that its call names an offered tool and fits that tool's schema.

A call has its arguments as JSON, as XML elements whose values are raw text, or in a notation of its own
(value_grammar.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .lark_rules import LarkRules, literal
from .parsing.calls import schema_types
from .regex_dialect import convert_schema
from .value_grammar import ANNOTATIONS, Notation, ValueWriter, unenforced_keywords

ANY_TEXT = r"/(.|\n)*/"  # up to a special token, which is no text
PYTHON_STRING = r"""/"([^"\\\x00-\x1f]|\\["\\nt])*"/"""
SEPARATOR, FENCE, QUOTE = "<｜tool▁sep｜>", "\n```json\n", '<|"|>'
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,8}"  # unbounded, it is legal between JSON's tokens for ever


@dataclass(frozen=True)
class CallGrammar:
    """How one format writes a call: `begin`, then the body of one of the tools."""

    begin: str  # the marker in front of a call; empty where there is none
    end: str
    write_body: Callable[[str, Mapping[str, Any], bool, LarkRules], str]  # tool, schema, lenient -> a Lark expression
    several: bool = True  # more calls may follow the first
    between: str = '"\\n"'  # Lark for what separates two calls
    around: tuple[str, str] = ("", "")  # all calls
    reasoning: tuple[str, str] | None = None  # what encloses the reasoning in front, where the call's markers do too
    gated: bool = True  # `begin` can be waited for: no token holds its end and more
    unenforced: Callable[[Mapping[str, Any]], list[str]] | None = None  # keywords that are left out beyond JSON's own


def write_json_body(fields: tuple[str, str], before: str, after: str):
    def write(name: str, schema: Mapping[str, Any], lenient: bool, rules: LarkRules) -> str:
        head = f'{before}{{"{fields[0]}": {json.dumps(name)}, "{fields[1]}": '
        return " ".join((rules.write(head), rules.add(json_rule(schema, lenient)), rules.write("}" + after)))

    return write


def write_harmony_body(name: str, schema: Mapping[str, Any], lenient: bool, rules: LarkRules) -> str:
    head = f"{name} <|constrain|>json<|message|>"
    return f"{rules.write(head)} {rules.add(json_rule(schema, lenient))}"


def write_deepseek_body(name: str, schema: Mapping[str, Any], lenient: bool, rules: LarkRules) -> str:
    """V3.1's form or V3's, as the model likes."""
    value = rules.add(json_rule(schema, lenient))
    fenced = f"{rules.write(f'function{SEPARATOR}{name}' + FENCE)} {value} {literal(chr(10) + '```')}"
    return f"({rules.write(name + SEPARATOR)} {value} | {fenced})"


def write_xml_body(function: str, parameter: str, parameter_end: str, function_end: str):
    def write(name: str, schema: Mapping[str, Any], lenient: bool, rules: LarkRules) -> str:
        parts = [rules.write("\n" + function.replace("NAME", name) + "\n")]
        required = schema.get("required") or ()
        for key, own in (schema.get("properties") or {}).items():
            value = write_xml_value(own, schema, parameter_end, lenient, rules)
            whole = f"{rules.write(parameter.replace('NAME', key))} {value}"
            parts.append(whole if key in required else f"({whole})?")
        return " ".join((*parts, rules.write(function_end)))

    return write


def write_xml_value(schema: Any, root: Mapping[str, Any], end: str, lenient: bool, rules: LarkRules) -> str:
    """A string is raw text up to the end of its element, anything else is JSON."""
    if isinstance(schema, Mapping) and "enum" in schema and all(isinstance(v, str) for v in schema["enum"]):
        return f"({' | '.join(map(literal, schema['enum']))}) {literal(end)}"
    if may_be_text(schema, root):
        return rules.add(r"/(.|\n)*/", f"[suffix={json.dumps(end)}]")
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{rules.add(json_rule({**definitions, **schema}, lenient))} {literal(end)}"


def may_be_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether an XML form writes a value as raw text: a string may be meant, or anything."""
    kinds = schema_types(resolve(schema, root))
    return not kinds or "string" in kinds


def resolve(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """A schema without the references on its top level and in its alternatives."""
    if not isinstance(schema, Mapping) or depth > 8:
        return {}
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
        target: Any = root
        for part in ref[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return resolve(target, root, depth + 1)
    alternatives = {k: [resolve(s, root, depth + 1) for s in schema[k]] for k in ("anyOf", "oneOf") if k in schema}
    return {**schema, **alternatives}


def unenforced_in_xml(schema: Mapping[str, Any]) -> list[str]:
    """Of strings, which are raw text, nothing but an enum is held."""
    texts = (s for s in (schema.get("properties") or {}).values() if isinstance(s, Mapping) and may_be_text(s, schema))
    held = {"type", "enum", "anyOf", "oneOf", "$ref"} | ANNOTATIONS
    return list(dict.fromkeys(str(key) for own in texts for key in own if key not in held))


def gemma_notation(rules: LarkRules) -> Notation:
    quote = rules.write(QUOTE)
    return Notation(
        string=f"{quote} {rules.add(ANY_TEXT)} {quote}",
        write_string=lambda text: f"{quote} {literal(text)} {quote}",
        write_key=lambda key: literal(f"{key}:"),
        any_key=r"/[a-zA-Z_][a-zA-Z0-9_]{0,40}:/",
        comma=",",
    )


def python_notation(rules: LarkRules) -> Notation:
    return Notation(
        string=PYTHON_STRING,
        write_string=lambda text: literal(json.dumps(text, ensure_ascii=False)),
        write_key=lambda key: literal(f"{json.dumps(key, ensure_ascii=False)}: "),
        any_key=f'{PYTHON_STRING} ": "',
        comma=", ",
        words=("True", "False", "None"),
    )


def write_gemma_body(name: str, schema: Mapping[str, Any], lenient: bool, rules: LarkRules) -> str:
    notation = gemma_notation(rules)
    members = ValueWriter(notation, rules, schema).write_members(schema, notation.write_key, notation.comma)
    return f"{literal(f'call:{name}{{')} {members} {literal('}')}"


def write_python_body(name: str, schema: Mapping[str, Any], lenient: bool, rules: LarkRules) -> str:
    notation = python_notation(rules)
    members = ValueWriter(notation, rules, schema).write_members(schema, lambda key: literal(f"{key}="), notation.comma)
    return f"{literal(f'{name}(')} {members} {literal(')')}"


CALL_GRAMMARS = {
    "hermes": CallGrammar("<tool_call>", "</tool_call>", write_json_body(("name", "arguments"), "\n", "\n")),
    "smollm3": CallGrammar("<tool_call>", "</tool_call>", write_json_body(("name", "arguments"), "\n", "\n")),
    "harmony": CallGrammar(
        "<|channel|>commentary to=functions.",
        "",
        write_harmony_body,
        several=False,
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        gated=False,
    ),
    "deepseek": CallGrammar(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        write_deepseek_body,
        between='"\\n"?',
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "gemma4": CallGrammar("<|tool_call>", "<tool_call|>", write_gemma_body, between="", unenforced=unenforced_keywords),
    "python": CallGrammar("<code>", "</code>", write_python_body, unenforced=unenforced_keywords),
    "llama3": CallGrammar("", "", write_json_body(("name", "parameters"), "", ""), several=False),
    "mistral": CallGrammar("[TOOL_CALLS]", "", write_json_body(("name", "arguments"), "[", "]"), several=False),
    "qwen3_coder": CallGrammar(
        "<tool_call>",
        "</tool_call>",
        write_xml_body("<function=NAME>", "<parameter=NAME>\n", "\n</parameter>\n", "</function>\n"),
        unenforced=unenforced_in_xml,
    ),
    "minimax_m2": CallGrammar(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        write_xml_body('<invoke name="NAME">', '<parameter name="NAME">', "</parameter>\n", "</invoke>\n"),
        unenforced=unenforced_in_xml,
    ),
}


def json_rule(schema: Any, lenient: bool) -> str:
    options = {"whitespace_pattern": WHITE_SPACE} | ({"lenient": True} if lenient else {})
    given = convert_schema(schema, strict=not lenient) if isinstance(schema, Mapping) and schema else {"type": "object"}
    return f"%json {json.dumps(given | {'x-guidance': options}, ensure_ascii=False)}"


def write_call_grammar(
    form: CallGrammar,
    tools: Sequence[Mapping[str, Any]],
    lenient: Mapping[str, bool],
    write: Callable[[str], str],
    from_begin: bool,
    several: bool = True,
) -> str:
    """Lark for calls of these tools, one or `several`. `write`: how a text with markers in it is written there;
    `from_begin`: with all that comes in front of the first call."""
    rules, bodies = LarkRules(write), []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        bodies.append(form.write_body(function["name"], schema, lenient[function["name"]], rules))
    begin, end, (before, after) = write(form.begin), write(form.end), map(write, form.around)
    start = f"{begin if from_begin else ''} body {end}"
    if from_begin:
        more = f"({form.between} {begin} body {end})*" if form.several and several else ""
        start = f"{before} {start} {more} {after}"
        if form.reasoning is not None:
            opened, closed = map(write, form.reasoning)
            start = f"({opened} {rules.add(ANY_TEXT)} {closed})? {start}"
    return "\n".join((f"start: {start}", "body: " + "\n    | ".join(bodies), *rules.lines))
