"""Ollama's package: chat, generate and what lists the models."""

import json

import ollama
from calls import MODEL, QUESTION, SCHEMA, STORY, TOOL, URL, becomes_idle, check, raises

client = ollama.Client(URL)
MESSAGES = [{"role": "user", "content": QUESTION}]
SHORT = {"num_predict": 20}


def leave_stream() -> bool:
    stream = client.chat(MODEL, [{"role": "user", "content": STORY}], options={"num_predict": 2000}, stream=True)
    next(stream)
    stream.close()
    return becomes_idle()


def call_and_answer() -> bool:
    """Tools are offered (this protocol cannot force a call); a call and its result are read from the history."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "visit", "arguments": {"name": "Paris"}}}]}
    turns = [*MESSAGES, call, {"role": "tool", "tool_name": "visit", "content": "It was a fine visit."}]
    offered = client.chat(MODEL, MESSAGES, tools=[TOOL], options=SHORT).message
    return bool((offered.content or offered.tool_calls) and client.chat(MODEL, turns, tools=[TOOL], options=SHORT))


check("chat", lambda: "Paris" in client.chat(MODEL, MESSAGES, options=SHORT).message.content)
check(
    "chat, stream",
    lambda: "Paris" in "".join(p.message.content for p in client.chat(MODEL, MESSAGES, options=SHORT, stream=True)),
)
check("chat: counts and durations", lambda: client.chat(MODEL, MESSAGES, options=SHORT).eval_duration > 0)
check("chat: tools, a call, its result", call_and_answer)
check(
    "chat: format",
    lambda: json.loads(client.chat(MODEL, MESSAGES, format=SCHEMA, options=SHORT).message.content)["name"] == "Paris",
)
check("generate", lambda: client.generate(MODEL, QUESTION, options=SHORT).response)
check("generate, stream", lambda: list(client.generate(MODEL, QUESTION, options=SHORT, stream=True))[-1].done)
check("list, ps, show", lambda: client.list().models and client.ps() and client.show(MODEL).modelinfo)
check("pull", lambda: client.pull(MODEL).status == "success")
check("an unknown model: ResponseError", lambda: raises(ollama.ResponseError, lambda: client.chat("x", MESSAGES)))
check(
    "too long: ResponseError",
    lambda: raises(ollama.ResponseError, lambda: client.chat(MODEL, [{"role": "user", "content": "word " * 9000}])),
)
check("a stream that is left", leave_stream)
