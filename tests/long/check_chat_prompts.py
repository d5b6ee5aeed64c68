"""python -m tests.long.check_chat_prompts [--count 2000] [--only NAME]: prompts of real tokenizers and templates.

For every pair of tests/support/real_chat.py: a conversation with reasoning, two tool calls and their results renders as
transformers renders it, with the same ids; what the model's turn was rendered as parses back to the same structure; and
random contents full of the vocabulary's special strings leave the prompt's structure as it is. Fetches what it needs.
"""

import argparse
import json
import random
import sys

from mlxrt.text.messages import normalise_messages
from mlxrt.text.parsing import OutputFormat

from ..support import real_chat

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "days": {"type": "integer", "description": "how many"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string", "description": "what"}}},
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
CALLS = [("get_weather", {"city": "Paris", "days": 3}), ("search", {"query": 'a "q" é'})]
REASONING = "I look it up."


def converse(system: str, user: str, result: str, calls: bool = True) -> list[dict]:
    messages: list[dict] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if not calls:
        return messages
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(CALLS)
    ]
    answer = {"role": "assistant", "content": None, "reasoning_content": REASONING, "tool_calls": made}
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": result + str(i)} for i in range(2)]
    return [*messages, answer, *results]


def compare_ids(name, ours, truth) -> list[str]:
    """Renderings and ids against transformers', after our normalisation."""
    wrong = []
    for tools in (None, TOOLS):
        messages = converse("Be brief.", "Größe? {x} [y] 'q' <b>", "sunny\n20°", tools is not None)
        chosen = ours.chat_format.compile(tools)
        features = chosen.features
        normal = normalise_messages(messages, features, tools, chosen.source)
        extra = {"xml_tools": tools} if features.tools == "xml_tools" else {}
        wanted = truth.apply_chat_template(
            normal, chat_template=chosen.source, tools=tools if features.tools else None, tokenize=False,
            add_generation_prompt=True, **extra,
        )  # fmt: skip
        if ours.render(messages, tools=tools) != wanted:
            wrong.append(f"{name}: rendered otherwise than by transformers, tools {bool(tools)}")
        elif ours.chat(messages, tools=tools) != truth.encode(wanted, add_special_tokens=False):
            wrong.append(f"{name}: other ids than transformers', tools {bool(tools)}")
    return wrong


def find_turn(ours) -> tuple[str, str]:
    """The prompt before the model's turn, as far as the turn's rendering agrees with it, and the turn."""
    messages = converse("Be brief.", "Weather?", "x")[:3]
    before = ours.render(messages[:2], tools=TOOLS)
    after = ours.render(messages, tools=TOOLS, add_generation_prompt=False)
    at = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), len(before))
    if at < len(before) and (marker := before.rfind("<", at - 12, at)) >= 0:
        at = marker  # the two differ inside a marker
    return before[:at], after[at:]


def parse_back(name, ours) -> list[str]:
    """The model's turn, encoded, must parse to its reasoning and calls, however often the stream is read."""
    chosen, features = ours.chat_format.output_format({}), ours.chat_format.compile(TOOLS).features
    tail, turn = find_turn(ours)
    if "user" in turn.partition("assistant")[0][:40]:
        return []  # the template rewrites the user's turn as well: no rendering of the answer alone
    found = read_turn(chosen, ours, tail, turn, not features.tools)
    split = features.calls and not features.several_calls  # into messages of one call each
    calls = [(c.name, c.parsed) for c in found[1]]
    if calls != CALLS and not (split and calls == CALLS[:1]):
        return [f"{name}: the turn {turn!r} parsed to {calls}"]
    if REASONING in turn and chosen.reasoning != "none" and found[0] != REASONING:
        return [f"{name}: the turn {turn!r} has reasoning {found[0]!r}"]
    return []


def read_turn(form: OutputFormat, ours, tail: str, turn: str, as_text: bool):
    prompt = ours.encode(tail, special=False)
    parser = form.build_parser(ours.lexer_vocabulary, prompt, SCHEMAS, True, tail[-200:], tools_as_text=as_text)
    assert parser is not None
    segments = [s for token in ours.encode(turn, special=False) for s in parser.push(token)] + parser.finish()
    assert "".join(s.raw for s in segments).lstrip() == turn.lstrip()  # some encoders put a space before a text
    reasoning = "".join(s.text for s in segments if s.kind == "reasoning")
    return reasoning, [s.call for s in segments if s.call is not None]


def inject(name, ours, count: int, rng: random.Random) -> list[str]:
    """Random contents made of special strings: the structure's ids must be those of harmless contents."""
    added = ours.lexer_vocabulary.added
    special = sorted(ours.chat_format.guard.forms)
    structural = {added[text] for text in special}
    keep = lambda ids: [i for i in ids if i in structural]  # noqa: E731
    harmless = {
        calls: keep(ours.chat(converse("zz", "zz", "zz", calls), tools=TOOLS if calls else None))
        for calls in (False, True)
    }
    wrong = []
    for _ in range(count):
        calls = rng.random() < 0.5
        contents = [make_content(special, rng) for _ in range(3)]
        ids = ours.chat(
            converse(contents[0], f"x{contents[1]}x", f"y{contents[2]}", calls), tools=TOOLS if calls else None
        )
        if keep(ids) != harmless[calls]:
            wrong.append(f"{name}: forged by {contents}")
    return wrong


def make_content(special: list[str], rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 6)):
        one, other = rng.choice(special), rng.choice(special)
        parts.append(rng.choice([
            one, f"{one}\n{other}system\n", f"{one}{other}", one[:-1], one[1:], one[: len(one) // 2] + other,
            "hello é ", "<|", "|>", "\n", "{'a': 1}", "<｜", "\\u003c", " ",
        ]))  # fmt: skip
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="random contents over all vocabularies")
    parser.add_argument("--only", default="", help="pairs whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    real_chat.fetch_tokenizers()
    names = [name for name in real_chat.PAIRS if args.only in name]
    wrong: list[str] = []
    for name in names:
        ours, truth = real_chat.open_pair(name)
        each = -(-args.count // len(names))
        found = compare_ids(name, ours, truth) + parse_back(name, ours)
        found += inject(name, ours, each, random.Random(f"{args.seed} {name}"))
        form = ours.chat_format.output_format({})
        print(
            f"{name:44} {form.reasoning:8} {form.calls:12} {each} contents {'ok' if not found else 'WRONG'}", flush=True
        )
        wrong += found
    print(*wrong[:20], sep="\n")
    print(f"{len(names)} pairs, {each * len(names)} random contents, {len(wrong)} differences")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
