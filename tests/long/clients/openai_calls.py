"""OpenAI's package: chat, completions, responses."""

import asyncio
import json

import openai
from calls import MODEL, QUESTION, SCHEMA, STORY, TOOL, URL, becomes_idle, check, raises
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused-key", max_retries=0)
given = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}
chat, responses = client.chat.completions, client.responses
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
FUNCTION = {"type": "function", "strict": True, **TOOL["function"]}


class City(BaseModel):
    name: str


def join_chunks(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def helper_text() -> str:
    with chat.stream(**given) as stream:
        return stream.get_final_completion().choices[0].message.content


def call_and_answer() -> bool:
    """A forced call, its result, the answer."""
    asked = given | {"tools": [TOOL], "max_tokens": 60}
    message = chat.create(**asked, tool_choice="required").choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "It was a fine visit."}
    messages = [*given["messages"], message.model_dump(exclude_none=True), result]
    answer = chat.create(**asked | {"messages": messages}, tool_choice="none").choices[0]
    return bool(json.loads(call.function.arguments)["name"] and answer.message.content)


def streamed_call() -> str:
    with chat.stream(
        **given | {"max_tokens": 60}, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        return stream.get_final_completion().choices[0].message.tool_calls[0].function.arguments


def leave_stream() -> bool:
    with chat.create(
        **given | {"messages": [{"role": "user", "content": STORY}], "max_tokens": 2000}, stream=True
    ) as s:
        next(iter(s))
    return becomes_idle()


async def leave_whole() -> bool:
    """A plain call whose client gives up."""
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused-key", max_retries=0) as other:
        work = other.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": STORY}], max_tokens=2000, timeout=2
        )
        try:
            await work
        except openai.APITimeoutError:
            return becomes_idle()
    return False


def response_events() -> bool:
    with responses.stream(model=MODEL, input=QUESTION, max_output_tokens=40) as stream:
        kinds = [event.type for event in stream]
    return kinds[0] == "response.created" and kinds[-1] == "response.completed"


check("chat.completions.create", lambda: "Paris" in chat.create(**given).choices[0].message.content)
check("chat.completions.create, stream", lambda: "Paris" in join_chunks(chat.create(**given, stream=True)))
check("chat.completions.stream", lambda: "Paris" in helper_text())
check(
    "chat: usage in a stream",
    lambda: list(chat.create(**given, stream=True, stream_options={"include_usage": True}))[-1].usage.completion_tokens,
)
check("chat: tools, the result, an answer", call_and_answer)
check("chat: tools, streamed", lambda: json.loads(streamed_call())["name"])
check(
    "chat: response_format",
    lambda: json.loads(chat.create(**given, response_format=FORM).choices[0].message.content)["name"] == "Paris",
)
check(
    "chat.completions.parse",
    lambda: chat.parse(**given | {"max_tokens": 80}, response_format=City).choices[0].message.parsed.name,
)
check(
    "chat: n, logprobs, seed, stop",
    lambda: (
        len(chat.create(**given, n=2, seed=1, logprobs=True, top_logprobs=2, stop=["."], temperature=1).choices) == 2
    ),
)
check("completions.create", lambda: client.completions.create(model=MODEL, prompt="Paris is", max_tokens=4))
check(
    "responses.create",
    lambda: "Paris" in responses.create(model=MODEL, input=QUESTION, max_output_tokens=20).output_text,
)
check("responses.stream", response_events)
check(
    "responses: tools",
    lambda: (
        responses.create(
            model=MODEL,
            input=QUESTION,
            tools=[FUNCTION],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=60,
        )
        .output[0]
        .type
        == "function_call"
    ),
)
check(
    "responses.parse",
    lambda: responses.parse(model=MODEL, input=QUESTION, text_format=City, max_output_tokens=80).output_parsed.name,
)
check("models.list, models.retrieve", lambda: client.models.retrieve(client.models.list().data[0].id).id == MODEL)
check(
    "an unknown model: NotFoundError",
    lambda: raises(openai.NotFoundError, lambda: chat.create(**given | {"model": "x"})),
)
check(
    "a bad field: BadRequestError",
    lambda: raises(openai.BadRequestError, lambda: chat.create(**given, extra_body={"no_such_field": 1})),
)
check(
    "too long: BadRequestError",
    lambda: raises(
        openai.BadRequestError,
        lambda: chat.create(**given | {"messages": [{"role": "user", "content": "word " * 9000}]}),
    ),
)
check("a stream that is left", leave_stream)
check("a call that is given up", lambda: asyncio.run(leave_whole()))
