"""Every format with its markers and answers in it, for the parsers' tests."""

from dataclasses import dataclass, field

from mlxrt.text.parsing import OutputFormat, harmony
from mlxrt.text.parsing.select import CALL_FORMATS, REASONING_FORMATS

WEATHER = ("get_weather", {"city": "Paris", "days": 3})
SEARCH = ("search", {"query": 'a "quoted"\nline \\ é', "filters": {"n": [1, 2.5, None, True]}})


@dataclass(frozen=True)
class Format:
    """How a family writes: `special` markers are hidden tokens, `tokens` visible ones, the others plain text."""

    form: OutputFormat
    weather: str  # WEATHER as the family writes it
    search: str  # SEARCH, following another call
    special: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    think: str = ""  # {} is the thinking
    final: str = "{}"  # {} is the answer after thinking
    between: str = "\n"
    broken: str = ""  # a call whose arguments do not parse
    unknown: str = ""  # a call of a tool that is none
    unclosed: str = ""  # a call that is cut off
    tail: str = ""
    fragments: tuple[str, ...] = field(default=())

    @property
    def markers(self) -> tuple[str, ...]:
        if self.form.calls == "harmony":
            return harmony.MARKERS
        reasoning = REASONING_FORMATS.get(self.form.reasoning)
        return (*(reasoning.markers if reasoning else ()), *CALL_FORMATS[self.form.calls].markers)


HERMES_SEARCH = (
    '<tool_call>\n{"name": "search", "arguments": {"query": "a \\"quoted\\"\\nline \\\\ é", '
    '"filters": {"n": [1, 2.5, null, true]}}}\n</tool_call>'
)
QWEN = Format(
    OutputFormat("think", "hermes"),
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
    HERMES_SEARCH,
    tokens=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    think="<think>\n{}\n</think>\n\n",
    broken='<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>',
    unknown='<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
    unclosed='<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
)
XML_SEARCH = (
    '<tool_call>\n<function=search>\n<parameter=query>\na "quoted"\nline \\ é\n</parameter>\n'
    '<parameter=filters>\n{"n": [1, 2.5, null, true]}\n</parameter>\n</function>\n</tool_call>'
)
FORMATS = {
    "qwen3": QWEN,
    "hermes_as_text": Format(
        QWEN.form, QWEN.weather, QWEN.search, think=QWEN.think, broken=QWEN.broken, unknown=QWEN.unknown,
        unclosed=QWEN.unclosed,
    ),
    "qwen3_coder": Format(
        OutputFormat("think", "qwen3_coder"),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        XML_SEARCH,
        tokens=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        think="<think>\n{}\n</think>\n\n",
        unknown="<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        unclosed="<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
    ),
    "gemma4": Format(
        OutputFormat("gemma4", "gemma4"),
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        '<|tool_call>call:search{query:<|"|>a "quoted"\nline \\ é<|"|>,filters:{n:[1,2.5,null,true]}}<tool_call|>',
        special=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
        think="<|channel>thought\n{}\n<channel|>",
        between="",
        broken='<|tool_call>call:get_weather{city:<|"|>Paris}<tool_call|>',
        unknown="<|tool_call>call:rm{}<tool_call|>",
        unclosed='<|tool_call>call:get_weather{city:<|"|>Par',
    ),
    "llama3": Format(
        OutputFormat("none", "llama3"),
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        '{"name": "search", "parameters": {"query": "a \\"quoted\\"\\nline \\\\ é", '
        '"filters": {"n": [1, 2.5, null, true]}}}',
        special=("<|python_tag|>", "<|eom_id|>"),
        between="; ",
        broken='{"name": "get_weather", "parameters": {"city": }}',
        unknown='{"name": "rm", "parameters": {}}',
        unclosed='{"name": "get_weather", "parameters": {"city": "Par',
    ),
    "mistral_v7": Format(
        OutputFormat("mistral", "mistral"),
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": "abcdefghi"}]',
        '[TOOL_CALLS][{"name": "search", "arguments": {"query": "a \\"quoted\\"\\nline \\\\ é", '
        '"filters": {"n": [1, 2.5, null, true]}}}]',
        special=("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
        think="[THINK]{}[/THINK]",
        between="",
        broken='[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": }}]',
        unknown='[TOOL_CALLS][{"name": "rm", "arguments": {}}]',
        unclosed='[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Par',
    ),
    "mistral_v13": Format(
        OutputFormat("mistral", "mistral"),
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}',
        '[TOOL_CALLS]search[CALL_ID]abc123XYZ[ARGS]{"query": "a \\"quoted\\"\\nline \\\\ é", '
        '"filters": {"n": [1, 2.5, null, true]}}',
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        think="[THINK]{}[/THINK]",
        between="",
        broken='[TOOL_CALLS]get_weather[ARGS]{"city": }',
        unknown="[TOOL_CALLS]rm[ARGS]{}",
        unclosed='[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
    ),
    "minimax_m2": Format(
        OutputFormat("think", "minimax_m2"),
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">a "quoted"\nline \\ é</parameter>\n'
        '<parameter name="filters">{"n": [1, 2.5, null, true]}</parameter>\n</invoke>\n</minimax:tool_call>',
        tokens=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        think="<think>\n{}\n</think>\n\n",
        unknown='<minimax:tool_call>\n<invoke name="rm">\n</invoke>\n</minimax:tool_call>',
        unclosed='<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Par',
    ),
    "deepseek_v3": Format(
        OutputFormat("think", "deepseek"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        '{"query": "a \\"quoted\\"\\nline \\\\ é", "filters": {"n": [1, 2.5, null, true]}}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        special=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
                 "<｜tool▁calls▁end｜>"),
        tokens=("<think>", "</think>"),
        think="<think>\n{}\n</think>\n\n",
        broken="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": }\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        unknown="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>rm\n```json\n{}\n```<｜tool▁call▁end｜>",
        unclosed="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Par',
    ),
    "deepseek_v31": Format(
        OutputFormat("think", "deepseek"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 3}<｜tool▁call▁end｜>',
        '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "a \\"quoted\\"\\nline \\\\ é", '
        '"filters": {"n": [1, 2.5, null, true]}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        think="<think>{}</think>",
        between="",
        broken='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": }<｜tool▁call▁end｜>',
        unknown="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        unclosed='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Par',
    ),
    "smollm3": Format(
        OutputFormat("think", "smollm3"),
        '<code>get_weather(city="Paris", days=3)</code>',
        HERMES_SEARCH,
        think="<think>\n{}\n</think>\n",
        unknown='<code>rm(path="/")</code>',
        unclosed='<code>get_weather(city="Par',
    ),
    "gpt_oss": Format(
        OutputFormat("harmony", "harmony"),
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|>',
        "<|start|>assistant to=functions.search<|channel|>commentary json<|message|>"
        '{"query": "a \\"quoted\\"\\nline \\\\ é", "filters": {"n": [1, 2.5, null, true]}}<|call|>',
        special=harmony.MARKERS,
        think="<|channel|>analysis<|message|>{}<|end|>",
        final="<|start|>assistant<|channel|>final<|message|>{}<|return|>",
        between="",
        broken='<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": }<|call|>',
        unknown="<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{}<|call|>",
        unclosed='<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Par',
        tail="<|start|>assistant",
    ),
}  # fmt: skip
