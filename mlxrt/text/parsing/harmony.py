"""gpt-oss's harmony: messages of a header and a body, the header naming a channel and a recipient.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

import re

from .calls import PartialCall, RawCall, unwrap_arguments
from .lexer import Item
from .segments import ANSWER, REASONING, TOOL_CALL, SegmentWriter
from .tags import Tools, parse_arguments

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
OBJECT = re.compile(r"\s*(?=\{)")
RECIPIENT = re.compile(r"to=([^\s<]+)")
CALL_HEADER = "<|channel|>commentary to=functions."
END_THINKING = "<|end|><|start|>assistant<|channel|>final<|message|>"


class HarmonyReader:
    """Items in, segments out. The prompt ends in a header: `<|start|>assistant`."""

    def __init__(self, tools: Tools | None, tail: str = "", split_reasoning: bool = True):
        self.writer = SegmentWriter(reasoning_first=False)
        self._tools, self._split = tools, split_reasoning
        self._header: str | None = ""  # being read; None inside a body
        self._first = True  # no marker yet: a text is an answer without a header
        self._kind, self._function, self._call = ANSWER, "", []  # type: str, str, list[Item]
        self._partial: PartialCall | None = None
        self.may_think = True
        self._enter(tail)

    def _enter(self, tail: str) -> None:
        """Begin where the prompt ends: inside a body, if it has a header of its own."""
        _, start, message = tail.rpartition(START)
        if start and MESSAGE in message and END not in message:
            self._header, self._first = message.partition(MESSAGE)[0].partition(CHANNEL)[2], False
            self._begin_body()

    @property
    def kind(self) -> str:
        return self._kind if self._header is None else ANSWER

    @property
    def thinking(self) -> bool:
        return self._header is None and self._kind == REASONING

    @property
    def reading(self) -> str:
        return TOOL_CALL if self._function and self._header is None else self.kind

    def push(self, item: Item) -> None:
        if self._header is not None:
            self._push_header(item)
        elif item.marker in (START, CHANNEL):  # the end of the message before is missing
            self._end_body(item)
            self._header, self._first = item.marker, False
        elif item.marker in (END, RETURN, CALL):
            self._end_body(item)
            self._header, self._first = "", True
        elif self._function:
            self._call.append(item)
            self._give_out_partial(item.text)
        elif item.marker:
            self.writer.skip(self._kind, item.raw)
        else:
            self.writer.write(self._kind, item.text, item.raw, "\n")

    def _push_header(self, item: Item) -> None:
        assert self._header is not None
        text = self._header + item.text
        if self._first and not item.marker and text.strip() and not is_recipient(text):
            self._header, self._first = None, False  # an answer without a header
            self.writer.write(ANSWER, text, item.raw, "\n")
            return
        self.writer.skip(ANSWER, item.raw)
        if item.marker == MESSAGE:
            self._begin_body()
        elif item.marker in (END, RETURN, CALL):
            self._header, self._first = "", True
        elif item.marker == START:
            self._header, self._first = START, False
        else:
            self._header += item.marker or item.text
            self._first &= not item.marker

    def _begin_body(self) -> None:
        header = (self._header or "").removeprefix(START)
        channel = re.match(r"\s*([\w-]*)", header.partition(CHANNEL)[2] or header)
        recipient = RECIPIENT.search(header)
        self._header, self._first = None, False
        thinks = self._split and self.may_think and channel is not None and channel[1] == "analysis"
        self._kind = REASONING if thinks else ANSWER
        name = recipient[1] if recipient else ""
        self._function = name.removeprefix("functions.") if self._tools is not None and name != "assistant" else ""
        self._call, self._partial = [], PartialCall(OBJECT, self._function)
        self.writer.add_border(self._kind)

    def _give_out_partial(self, text: str) -> None:
        """As much of the call's arguments as is certain."""
        assert self._tools is not None and self._partial is not None
        self._partial.push(text)
        if (fresh := self._partial.take()) and self._tools.offers(self._function):
            self.writer.add_delta(self._tools.make_id(self.writer.next_index), self._function, fresh)

    def _end_body(self, item: Item) -> None:
        """The end of a message, by this item: the end marker is part of it, the next one's beginning is not."""
        if self._function:
            self._end_call(item.raw if item.marker in (END, RETURN, CALL) else "", closed=True)
            if item.marker in (START, CHANNEL):
                self.writer.skip(ANSWER, item.raw)
        else:
            self.writer.skip(self._kind, item.raw)
        self._kind = ANSWER

    def _end_call(self, end: str, closed: bool) -> None:
        assert self._tools is not None
        text = unwrap_arguments("".join(i.text for i in self._call).strip() or "{}")
        whole = closed or not parse_arguments(text)[1]
        calls = self._tools.build_calls([RawCall(self._function, text)], self.writer.next_index) if whole else None
        raw, self._function = "".join(i.raw for i in self._call) + end, ""
        if calls is None:
            self.writer.drop_call()
            for i in self._call:
                self.writer.write(self._kind, i.text, i.raw, "\n")
            self.writer.skip(self._kind, end)
        else:
            self.writer.add_calls(calls, raw)

    def finish(self) -> None:
        if self._header is None and self._function:
            self._end_call("", closed=False)
        elif self._first and self._header:  # it was no header
            self.writer.write(ANSWER, self._header, "", "\n")
        self.writer.finish()


def is_recipient(text: str) -> bool:
    """Whether a header's text names, or begins to name, a recipient."""
    text = text.lstrip()
    return text.startswith("to=") or "to=".startswith(text) or text in ("json", "code")
