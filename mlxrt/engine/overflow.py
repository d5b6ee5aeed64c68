"""What a conversation does when it no longer fits the context: forget its oldest turns, or keep a summary of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .request import Request

OVERFLOW = ("error", "drop-oldest", "summarize")
SUMMARY_SHARE = 8  # a summary may take this part of the context
SUMMARY_HEAD = "Summary of the conversation so far:\n"
SUMMARY_REQUEST = (
    "Summarize the conversation so far in a few sentences, for yourself: names, numbers, decisions and open questions. "
    "Write only the summary."
)


@dataclass(frozen=True)
class Turn:
    """The conversation after an answer."""

    messages: tuple[dict, ...] = ()
    tokens: tuple[int, ...] = ()  # all that was fed and produced for the last answer
    summary: str = ""  # of what was before the first message
    salt: str = ""  # the cache salt of the last answer


@dataclass(frozen=True)
class Shortened:
    """Turns that are left, and the messages that are gone."""

    turns: tuple[Turn, ...]
    dropped: tuple[dict, ...] = ()
    count: int = 0  # turns that are gone


def drop_oldest(short: Shortened) -> Shortened | None:
    """Without the oldest question and its answer, and the tool results that belong to it; None: nothing can go."""
    first, *later = short.turns
    for n in range(1, len(later) + 1):
        gone = len(later[n - 1].messages)
        rest = later[n:]
        if rest and rest[0].messages[gone]["role"] == "tool":
            continue  # its call would be missing
        begun = len(first.messages)
        left = [Turn(first.messages + turn.messages[gone:], summary=first.summary, salt=turn.salt) for turn in rest]
        return Shortened((first, *left), short.dropped + later[n - 1].messages[begun:], short.count + n)
    return None


def set_summary(turns: Sequence[Turn], summary: str) -> tuple[Turn, ...]:
    """The turns with this summary in the system message, instead of any other."""
    old = [m for m in turns[0].messages if m["role"] == "system"]
    text = old[0]["content"].partition(SUMMARY_HEAD)[0].rstrip() if old else ""
    system = {"role": "system", "content": f"{text}\n\n{SUMMARY_HEAD}{summary}".lstrip()}
    count = len(turns[0].messages)
    rest = [m for m in turns[0].messages if m["role"] != "system"]
    return tuple(
        replace(turn, messages=(system, *rest, *turn.messages[count:]), tokens=(), summary=summary) for turn in turns
    )


def make_summary(engine: Any, system: Sequence[dict], dropped: Sequence[dict], salt: str) -> tuple[str, str]:
    """The model's summary of these messages; or nothing, and why. `salt`: of the conversation's prefixes."""
    tokenizer = engine.tokenizer
    limit = max(8, engine.context // SUMMARY_SHARE)
    off = {"thinking": "off"} if tokenizer.chat_format.thinks and tokenizer.chat_format.switchable else {}
    messages = [*system, *dropped, {"role": "user", "content": SUMMARY_REQUEST}]
    request = Request.of(messages, max_tokens=limit, cache_salt=salt, **off)
    prompt = engine.encode(request)
    if len(prompt) + limit > engine.context:
        return "", "the turns are too long to be summarized"
    summary = engine.generate(request).text.strip()
    if not summary:
        return "", "the model's summary was empty"
    replaced = sum(len(tokenizer.encode(str(m.get("content") or ""), special=False)) for m in dropped)
    if len(tokenizer.encode(summary, special=False)) >= replaced:
        return "", "the model's summary was longer than what it replaces"
    return summary, ""
