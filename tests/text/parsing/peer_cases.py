"""What other engines' suites ask of their parsers, written anew as data: vLLM's tool and reasoning tests, mlx-lm's.

    python -m tests.text.parsing.peer_cases     the table of agreements, and every difference with its reason

A case has what the peer's test asserts; where we differ, what we give instead and why.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cutting import Stream, fold, read
from .formats import FORMATS

Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class Case:
    suite: str
    name: str
    family: str  # of FORMATS
    text: str
    answer: str | None = ""  # None: the peer's test does not look at it
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    opened: bool = False  # the prompt opened the reasoning
    ours: tuple[str, str, tuple[tuple[str, Any], ...]] | None = None  # answer, reasoning, calls, where they differ
    why: str = ""


def parse(case: Case, seed: int | None = None) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    family = FORMATS[case.family]
    tail = family.think.partition("{}")[0] if case.opened else family.tail
    stream = Stream(case.text, (*family.special, *family.tokens), family.special, seed)
    found = fold(read(stream, family.form, tools=None, tail=tail))
    calls = tuple((c.name, c.parsed if c.error is None else c.arguments) for c in found.calls)
    return found.answer, found.reasoning, calls


def agrees(case: Case, found) -> bool:
    answer, reasoning, calls = found
    same = case.answer is None or case.answer == answer
    return same and case.reasoning == reasoning and case.calls == calls


# The suite that every parser of vLLM's passes: eight outputs in the format's own words.


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama3(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
    return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]'


def mistral_v13(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def deepseek_v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def harmony(name: str, arguments: str) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def gemma4(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{write_gemma4(json.loads(arguments))}<tool_call|>"


def write_gemma4(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{write_gemma4(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_gemma4, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def python(name: str, arguments: str) -> str:
    return f"<code>{name}({', '.join(f'{k}={v!r}' for k, v in json.loads(arguments).items())})</code>"


WRITERS: dict[str, Callable[[str, str], str]] = {
    "qwen3": hermes, "hermes_as_text": hermes, "llama3": llama3, "mistral_v7": mistral, "mistral_v13": mistral_v13,
    "deepseek_v3": deepseek_v3, "deepseek_v31": deepseek_v31, "gemma4": gemma4, "smollm3": python, "gpt_oss": harmony,
}  # fmt: skip
TYPES = {
    "string_field": "hello", "int_field": 42, "float_field": 3.14, "bool_field": True, "null_field": None,
    "array_field": ["a", "b", "c"], "object_field": {"nested": "value"}, "empty_array": [], "empty_object": {},
}  # fmt: skip
ESCAPES = {"text": 'He said "hello"', "path": "C:\\Users\\file", "newline": "line1\nline2"}
TOKYO = {"city": "Tokyo"}


def common_cases() -> list[Case]:
    found = []
    for family, write in WRITERS.items():
        suite = f"vLLM common: {family}"
        call = lambda name, value, write=write: write(name, json.dumps(value))  # noqa: E731
        opens = "<｜tool▁calls▁begin｜>" if family.startswith("deepseek") else ""
        ends = "<｜tool▁calls▁end｜>" if opens else ""
        between = "; " if family == "llama3" else ""
        pair = between.join((call("get_weather", TOKYO), call("get_time", {"zone": "JST"})))
        plain = "How can I help you today? I can check weather for you."
        before = "Let me check the weather for you."
        found += [
            Case(suite, "no tool calls", family, plain, plain),
            Case(suite, "single", family, opens + call("get_weather", TOKYO) + ends, calls=(("get_weather", TOKYO),)),
            Case(suite, "parallel", family, opens + pair + ends,
                 calls=(("get_weather", TOKYO), ("get_time", {"zone": "JST"}))),
            Case(suite, "data types", family, opens + call("test_function", TYPES) + ends,
                 calls=(("test_function", TYPES),)),
            Case(suite, "empty arguments", family, opens + call("get_current_time", {}) + ends,
                 calls=(("get_current_time", {}),)),
            Case(suite, "escaped strings", family, opens + call("send_message", ESCAPES) + ends,
                 calls=(("send_message", ESCAPES),)),
        ]  # fmt: skip
        if family != "llama3":
            text = before + opens + call("get_weather", TOKYO) + ends
            found.append(Case(suite, "surrounding text", family, text, None, calls=(("get_weather", TOKYO),)))
    return found


# vLLM, tests of single parsers

STRICT_LLAMA = "a bare JSON object is a call only at the start of an answer or after another call: prose may show JSON"
SPACE = "white space beside a marker is left out of reasoning and answer"
PROMPT_DECIDES = "the prompt's end says whether reasoning is open, not the parser's name"
CUT_STRING = "a call that does not parse is given out with its error, not repaired"


def search(query: str, **more: Any) -> str:
    return llama3("searchTool", json.dumps({"query": query, **more}))


OPEN_INCIDENTS = llama3("getOpenIncidentsTool", "{}")
NESTED = {"level1": {"level2": {"level3": {"level4": {"value": "deep"}}}}}
BRACKETS = {"query": "test {value} [complex]", "nested": {"inner": "more {brackets}"}}
SPOKEN = {"text": 'He said "Hello {world}"'}
THREE = (("searchTool", {"query": "test1"}), ("getOpenIncidentsTool", {}), ("searchTool", {"query": "test2"}))
PROSE = f"Here is the result: {OPEN_INCIDENTS} Would you like to know more?"
PROSE_3 = f"Here are the results: {search('test1')}; {OPEN_INCIDENTS}; {search('test2')} Would you like to know more?"
AFTER = "I used {searchTool} for this."
QUOTED = 'The arguments I passed were {"query": "test"}'
LLAMA = "vLLM llama3_json"
LLAMA_CASES = [
    Case(LLAMA, "inside prose", "llama3", PROSE, "", calls=(("getOpenIncidentsTool", {}),), ours=(PROSE, "", ()),
         why=STRICT_LLAMA),
    Case(LLAMA, "with arguments", "llama3", search("test query", limit=10),
         calls=(("searchTool", {"query": "test query", "limit": 10}),)),
    Case(LLAMA, "no JSON", "llama3", "This is just some text without any tool calls",
         "This is just some text without any tool calls"),
    Case(LLAMA, "invalid JSON", "llama3", '{"name": "invalidTool", "parameters": {invalid json}',
         '{"name": "invalidTool", "parameters": {invalid json}'),
    Case(LLAMA, "arguments for parameters", "llama3", '{"name": "searchTool", "arguments": {"query": "test"}}',
         calls=(("searchTool", {"query": "test"}),)),
    Case(LLAMA, "three with semicolons", "llama3", f"{search('test1')}; {OPEN_INCIDENTS}; {search('test2')}",
         calls=THREE),
    Case(LLAMA, "three with white space", "llama3", f"{search('test1')} ; {OPEN_INCIDENTS} ; {search('test2')}",
         calls=THREE),
    Case(LLAMA, "three inside prose", "llama3", PROSE_3, None, calls=THREE, ours=(PROSE_3, "", ()), why=STRICT_LLAMA),
    Case(LLAMA, "deeply nested", "llama3", llama3("complexTool", json.dumps(NESTED)), calls=(("complexTool", NESTED),)),
    Case(LLAMA, "brackets in strings", "llama3", llama3("searchTool", json.dumps(BRACKETS)),
         calls=(("searchTool", BRACKETS),)),
    Case(LLAMA, "escaped quotes", "llama3", llama3("parserTool", json.dumps(SPOKEN)), calls=(("parserTool", SPOKEN),)),
    Case(LLAMA, "no name", "llama3", '{"parameters": {}}', '{"parameters": {}}'),
    Case(LLAMA, "no arguments", "llama3", '{"name": "toolWithoutParams"}', '{"name": "toolWithoutParams"}',
         ours=("", "", (("toolWithoutParams", {}),)), why="a tool without parameters is called without arguments"),
    Case(LLAMA, "a brace in the text after", "llama3", f"{search('test')} {AFTER}", None,
         calls=(("searchTool", {"query": "test"}),)),
    Case(LLAMA, "JSON in the text after", "llama3", f"{search('test')} {QUOTED}", None,
         calls=(("searchTool", {"query": "test"}),)),
    *(Case(LLAMA, f"separated by {between!r}", "llama3", f"{search('test1')}{between}{OPEN_INCIDENTS}",
           calls=THREE[:2]) for between in ("; ", ";", ";\n", "\n")),
]  # fmt: skip
HERMES = "vLLM hermes"
ANSWER = (("final_answer", {"trigger": True}),)
TRIGGER = '{"name": "final_answer", "arguments": {"trigger": true}}'
HERMES_CASES = [
    Case(HERMES, "only text", "qwen3", "This is some prior text that has nothing to do with tool calling.",
         "This is some prior text that has nothing to do with tool calling."),
    Case(HERMES, "a boolean", "qwen3", f"<tool_call>\n{TRIGGER}\n</tool_call>", calls=ANSWER),
    Case(HERMES, "no white space", "qwen3", f"<tool_call>{TRIGGER}</tool_call>", calls=ANSWER),
    Case(HERMES, "until the end", "qwen3", f"<tool_call>\n{TRIGGER}", calls=ANSWER),
    Case(HERMES, "a bracket is missing at the end", "qwen3", f"<tool_call>\n{TRIGGER[:-1]}",
         f"<tool_call>\n{TRIGGER[:-1]}"),
    Case(HERMES, "text, then a call", "qwen3", f"Sure, let me check the weather.<tool_call>{TRIGGER}</tool_call>",
         "Sure, let me check the weather.", calls=ANSWER),
    Case(HERMES, "two calls without space", "qwen3", f"<tool_call>{TRIGGER}</tool_call>" * 2, calls=ANSWER * 2),
    Case(HERMES, "arguments encoded twice", "qwen3",
         '<tool_call>\n{"name": "get_db_config", "arguments": "{\\"param\\": \\"max\\"}"}\n</tool_call>',
         calls=(("get_db_config", {"param": "max"}),)),
    Case(HERMES, "arguments are a string", "qwen3",
         '<tool_call>\n{"name": "do_thing", "arguments": "hello"}\n</tool_call>', calls=(("do_thing", '"hello"'),)),
]  # fmt: skip


def call_gemma4(arguments: str, name: str = "f", end: str = "<tool_call|>") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}{end}"


def quote(text: str) -> str:
    return f'<|"|>{text}<|"|>'


GEMMA = "vLLM gemma4"
GEMMA_VALUES: dict[str, Any] = {
    "": {}, "   ": {}, f"location:{quote('Paris')}": {"location": "Paris"},
    f"location:{quote('Paris, France')}": {"location": "Paris, France"},
    f"location:{quote('San Francisco')},unit:{quote('celsius')}": {"location": "San Francisco", "unit": "celsius"},
    "count:42": {"count": 42}, "score:3.14": {"score": 3.14}, "flag:true": {"flag": True},
    "flag:false": {"flag": False},
    "param:null": {"param": None}, "left:108.,right:22.8": {"left": 108.0, "right": 22.8},
    f"name:{quote('test')},count:42,active:true,score:3.14": {
        "name": "test", "count": 42, "active": True, "score": 3.14},
    f"nested:{{inner:{quote('value')}}}": {"nested": {"inner": "value"}},
    f"record_map:{{{quote('3')}:{quote('new text')}}}": {"record_map": {"3": "new text"}},
    f"outer:{{inner:{{{quote('3')}:{quote('new text')}}}}}": {"outer": {"inner": {"3": "new text"}}},
    f"items:[{quote('a')},{quote('b')}]": {"items": ["a", "b"]}, "items:[]": {"items": []},
    "items:[42,true,3.14]": {"items": [42, True, 3.14]},
    f"items:[[{quote('a]b')},{quote('c')}],{quote('tail')}]": {"items": [["a]b", "c"], "tail"]},
}  # fmt: skip
PARIS = (("get_weather", {"location": "Paris"}),)
GEMMA_PARIS = call_gemma4(f"location:{quote('Paris')}", "get_weather")
GEMMA_CASES = [
    *(Case(GEMMA, f"arguments {text}", "gemma4", call_gemma4(text), calls=(("f", value),))
      for text, value in GEMMA_VALUES.items()),
    Case(GEMMA, "a string without end", "gemma4", call_gemma4('key:<|"|>unterminated'),
         calls=(("f", {"key": "unterminated"}),), ours=("", "", (("f", '{key:<|"|>unterminated}'),)), why=CUT_STRING),
    Case(GEMMA, "a key without value", "gemma4", call_gemma4("key:"), calls=(("f", {"key": ""}),),
         ours=("", "", (("f", "{key:}"),)), why=CUT_STRING),
    Case(GEMMA, "text before", "gemma4", f"Let me check the weather for you. {GEMMA_PARIS}",
         "Let me check the weather for you.", calls=PARIS),
    Case(GEMMA, "two calls", "gemma4", GEMMA_PARIS * 2, calls=PARIS * 2),
    Case(GEMMA, "cut off", "gemma4", '<|tool_call>call:get_weather{location:<|"|>London',
         '<|tool_call>call:get_weather{location:<|"|>London', ours=("call:get_weather{location:London", "", ()),
         why="special tokens are never shown, not even those of a call that is cut off; raw has them"),
    Case(GEMMA, "a name with a hyphen", "gemma4", call_gemma4("", "get-weather"), calls=(("get-weather", {}),)),
    Case(GEMMA, "a name with a dot", "gemma4", call_gemma4("", "weather.get"), calls=(("weather.get", {}),)),
    Case("vLLM gemma4 reasoning", "thinking and an answer", "gemma4", "<|channel>thought\nI think.<channel|>Yes.",
         "Yes.", "I think."),
    Case("vLLM gemma4 reasoning", "no end", "gemma4", "<|channel>thought\nI think.", "", "I think."),
    Case("vLLM gemma4 reasoning", "an empty channel", "gemma4", "<|channel>thought\n<channel|>Yes.", "Yes."),
    Case("vLLM gemma4 reasoning", "no channel", "gemma4", "Yes.", "Yes."),
    Case("vLLM gemma4 reasoning", "a call after it", "gemma4", f"<|channel>thought\nI look.<channel|>{GEMMA_PARIS}",
         "", "I look.", PARIS),
]  # fmt: skip


def minimax(*calls: str) -> str:
    return f"<minimax:tool_call>{''.join(calls)}</minimax:tool_call>"


def invoke(name: str, **values: str) -> str:
    inner = "".join(f'<parameter name="{k}">{v}</parameter>' for k, v in values.items())
    return f'<invoke name="{name}">{inner}</invoke>'


SEATTLE = (("get_weather", {"city": "Seattle"}),)
MINIMAX = "vLLM minimax_m2"
MINIMAX_CASES = [
    Case(MINIMAX, "only text", "minimax_m2", "Hello world", "Hello world"),
    Case(MINIMAX, "text before", "minimax_m2", "Let me check. " + minimax(invoke("get_weather", city="Seattle")),
         "Let me check. ", calls=SEATTLE, ours=("Let me check.", "", SEATTLE), why=SPACE),
    Case(MINIMAX, "one call", "minimax_m2", minimax(invoke("get_weather", city="Seattle")), calls=SEATTLE),
    Case(MINIMAX, "two parameters", "minimax_m2", minimax(invoke("get_weather", city="Seattle", days="5")),
         calls=(("get_weather", {"city": "Seattle", "days": "5"}),)),
    Case(MINIMAX, "two calls", "minimax_m2", minimax(invoke("search", q="OpenAI"), invoke("search", q="Gemini")),
         calls=(("search", {"q": "OpenAI"}), ("search", {"q": "Gemini"}))),
    Case(MINIMAX, "two functions", "minimax_m2", minimax(invoke("fn_a", x="1"), invoke("fn_b", y="2")),
         calls=(("fn_a", {"x": "1"}), ("fn_b", {"y": "2"}))),
]  # fmt: skip

# Reasoning

BASH = "<tool_call>\n<function=bash>\n<parameter=command>\ncat /etc/hosts\n</parameter>\n</function>\n</tool_call>"
READ = (("bash", {"command": "cat /etc/hosts"}),)
THOUGHT, REST = "This is a reasoning section", "This is the rest"
QWEN, R1 = "vLLM qwen3 reasoning", "vLLM deepseek_r1 reasoning"
REASONING_CASES = [
    Case(QWEN, "the prompt opened it", "qwen3", f"{THOUGHT}</think>{REST}", REST, THOUGHT, opened=True),
    Case(QWEN, "the prompt opened it, nothing after", "qwen3", f"{THOUGHT}</think>", "", THOUGHT, opened=True),
    Case(QWEN, "both markers", "qwen3", f"<think>{THOUGHT}</think>{REST}", REST, THOUGHT),
    Case(QWEN, "opened twice", "qwen3", f"<think>{THOUGHT}</think>{REST}", REST, THOUGHT, opened=True),
    Case(QWEN, "no marker, opened", "qwen3", REST, "", REST, opened=True),
    Case(QWEN, "no marker", "qwen3", REST, "", REST, ours=(REST, "", ()), why=PROMPT_DECIDES),
    Case(QWEN, "nothing after", "qwen3", f"<think>{THOUGHT}</think>", "", THOUGHT),
    Case(QWEN, "several lines", "qwen3", "<think>This is a reasoning\nsection</think>This is the rest\nThat",
         "This is the rest\nThat", "This is a reasoning\nsection"),
    Case(QWEN, "no end", "qwen3", f"<think>{THOUGHT}", "", THOUGHT),
    Case(QWEN, "no end, opened", "qwen3", THOUGHT, "", THOUGHT, opened=True),
    Case(QWEN, "a call ends it", "qwen3_coder", f"I need to read the file.\n\n{BASH}", "",
         "I need to read the file.\n\n", READ, opened=True, ours=("", "I need to read the file.", READ), why=SPACE),
    Case(QWEN, "a call ends it, marker written", "qwen3_coder", f"<think>I need to read the file.\n\n{BASH}", "",
         "I need to read the file.\n\n", READ, ours=("", "I need to read the file.", READ), why=SPACE),
    Case(QWEN, "thinking off", "qwen3_coder", "This is plain content", "This is plain content"),
    Case(QWEN, "thinking off, a call", "qwen3_coder", f"I need to read the file.\n\n{BASH}",
         "I need to read the file.\n\n", "", READ, ours=("I need to read the file.", "", READ), why=SPACE),
    Case(R1, "simple", "deepseek_v3", f"{THOUGHT}</think>{REST}", REST, THOUGHT, opened=True),
    Case(R1, "nothing after", "deepseek_v3", f"{THOUGHT}</think>", "", THOUGHT, opened=True),
    Case(R1, "no end", "deepseek_v3", "This is content", "", "This is content", opened=True),
    Case(R1, "both markers", "deepseek_v3", f"<think>{THOUGHT}</think>{REST}", REST, THOUGHT, opened=True),
    Case(R1, "several lines", "deepseek_v3", "This\nThat</think>This is the rest\nThat", "This is the rest\nThat",
         "This\nThat", opened=True),
    Case(R1, "the shortest", "deepseek_v3", f"</think>{REST}", REST, "", opened=True),
    Case(R1, "empty lines before the marker", "deepseek_v3", f"\n{THOUGHT}\n</think>\n{REST}", f"\n{REST}",
         f"\n{THOUGHT}\n", opened=True, ours=(REST, THOUGHT, ()), why=SPACE),
    Case("vLLM mistral reasoning", "both markers", "mistral_v7", f"[THINK]{THOUGHT}[/THINK]{REST}", REST, THOUGHT),
    Case("vLLM mistral reasoning", "no end", "mistral_v7", f"[THINK]{THOUGHT}", "", THOUGHT),
    Case("vLLM mistral reasoning", "no marker", "mistral_v7", REST, REST),
    Case("vLLM gptoss reasoning", "two channels", "gpt_oss",
         f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{REST}<|return|>",
         REST, THOUGHT),
    Case("vLLM gptoss reasoning", "only analysis", "gpt_oss", f"<|channel|>analysis<|message|>{THOUGHT}", "", THOUGHT),
    Case("vLLM gptoss reasoning", "only final", "gpt_oss", f"<|channel|>final<|message|>{REST}<|return|>", REST),
    Case("vLLM gptoss reasoning", "commentary is shown", "gpt_oss",
         f"<|channel|>commentary<|message|>{REST}<|end|>", REST),
]  # fmt: skip

MULTIPLY = (("multiply", {"a": 12234585, "b": 48838483920}),)
MLX = "mlx-lm"
MLX_CASES = [
    Case(MLX, "JSON", "qwen3", hermes("multiply", '{"a": 12234585, "b": 48838483920}'), calls=MULTIPLY),
    Case(MLX, "qwen3_coder", "qwen3_coder",
         "<tool_call>\n<function=multiply>\n<parameter=a>\n12234585\n</parameter>\n<parameter=b>\n48838483920\n"
         "</parameter>\n</function>\n</tool_call>", calls=MULTIPLY,
         ours=("", "", (("multiply", {"a": "12234585", "b": "48838483920"}),)),
         why="this test's numbers come from a schema; without one a value is the text it is (with one: test_formats)"),
]  # fmt: skip
CASES = [
    *common_cases(), *LLAMA_CASES, *HERMES_CASES, *GEMMA_CASES, *MINIMAX_CASES, *REASONING_CASES, *MLX_CASES,
]  # fmt: skip


def main() -> None:
    suites: dict[str, Counter] = {}
    for case in CASES:
        suites.setdefault(case.suite, Counter())[agrees(case, parse(case))] += 1
    for suite, counts in suites.items():
        print(f"{suite:32} {counts[True]:3} agree {counts[False]:3} differ")
    for case in CASES:
        if not agrees(case, found := parse(case)):
            print(f"\n{case.suite}: {case.name}: {case.why or 'UNEXPLAINED'}\n  {case.text!r}\n  we: {found}")
    agreed = sum(counts[True] for counts in suites.values())
    print(f"\n{len(CASES)} cases, {agreed} agree, {len(CASES) - agreed} differ")


if __name__ == "__main__":
    main()
