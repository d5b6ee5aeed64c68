"""Anthropic's package: messages, count_tokens."""

import anthropic
from calls import MODEL, QUESTION, SCHEMA, STORY, URL, becomes_idle, check, raises

client = anthropic.Anthropic(base_url=URL, api_key="unused-key", max_retries=0)
given = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}
messages = client.messages
TOOL = {"name": "visit", "description": "visit a city", "input_schema": SCHEMA}
FORM = {"format": {"type": "json_schema", "schema": SCHEMA}}


def streamed_text() -> str:
    with messages.stream(**given) as stream:
        return "".join(stream.text_stream)


def call_and_answer() -> bool:
    """A forced call, its result, the answer."""
    asked = given | {"tools": [TOOL], "max_tokens": 60}
    first = messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It was a fine visit."}
    turns = [*given["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    answer = messages.create(**asked | {"messages": turns}, tool_choice={"type": "none"})
    return bool(first.stop_reason == "tool_use" and call.input["name"] and answer.content[0].text)


def streamed_call() -> str:
    with messages.stream(
        **given | {"max_tokens": 60}, tools=[TOOL], tool_choice={"type": "tool", "name": "visit"}
    ) as s:
        return next(b for b in s.get_final_message().content if b.type == "tool_use").input["name"]


def leave_stream() -> bool:
    with messages.stream(model=MODEL, messages=[{"role": "user", "content": STORY}], max_tokens=2000) as stream:
        next(iter(stream.text_stream))
    return becomes_idle()


def structured() -> str:
    text = messages.create(**given | {"max_tokens": 40}, extra_body={"output_config": FORM}).content[0].text
    return "Paris" in text and text.lstrip().startswith("{")


check("messages.create", lambda: "Paris" in messages.create(**given).content[0].text)
check("messages.create, stream", lambda: list(messages.create(**given, stream=True))[-1].type == "message_stop")
check("messages.stream", lambda: "Paris" in streamed_text())
check("messages: usage", lambda: messages.create(**given).usage.output_tokens)
check(
    "messages: system, cache_control",
    lambda: (
        messages.create(**given, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
        .content[0]
        .text
    ),
)
check("messages: tools, the result, an answer", call_and_answer)
check("messages: tools, streamed", streamed_call)
check("messages: output_config.format", structured)
check("messages.count_tokens", lambda: messages.count_tokens(model=MODEL, messages=given["messages"]).input_tokens)
check("models.list", lambda: client.models.list().data[0].id == MODEL)
check(
    "an unknown model: NotFoundError",
    lambda: raises(anthropic.NotFoundError, lambda: messages.create(**given | {"model": "x"})),
)
check(
    "too long: BadRequestError",
    lambda: raises(
        anthropic.BadRequestError,
        lambda: messages.create(**given | {"messages": [{"role": "user", "content": "word " * 9000}]}),
    ),
)
check("a stream that is left", leave_stream)
