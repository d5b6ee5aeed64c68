"""LangChain: ChatOpenAI, ChatAnthropic, ChatOllama."""

# ruff: noqa: B023  a call is made at once
import asyncio

from anthropic import NotFoundError as UnknownName
from calls import MODEL, QUESTION, SCHEMA, STORY, TOOL, URL, becomes_idle, check
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from ollama import ResponseError
from openai import NotFoundError


def error_text(call) -> str:
    try:
        call()
    except (NotFoundError, UnknownName, ResponseError) as error:
        return str(error)
    return ""


def leave_stream(chat) -> bool:
    stream = chat.stream(STORY)
    next(stream)
    stream.close()
    return becomes_idle()


async def cancel(chat) -> bool:
    work = asyncio.create_task(chat.ainvoke(STORY))
    await asyncio.sleep(1)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return work.cancelled() and becomes_idle()


def make_chats(model: str, tokens: int) -> dict:
    key = {"api_key": "unused-key", "max_retries": 0}
    return {
        "ChatOpenAI": ChatOpenAI(model=model, base_url=f"{URL}/v1", max_tokens=tokens, **key),
        "ChatAnthropic": ChatAnthropic(model_name=model, base_url=URL, max_tokens=tokens, **key),
        "ChatOllama": ChatOllama(model=model, base_url=URL, num_predict=tokens),
    }


chats = make_chats(MODEL, 40)
openai, anthropic, ollama = chats.values()
for name, chat in chats.items():
    check(f"{name}.invoke", lambda: "Paris" in chat.invoke(QUESTION).text)
    check(f"{name}.stream", lambda: "Paris" in "".join(c.text for c in chat.stream(QUESTION)))
    check(f"{name}: usage", lambda: chat.invoke(QUESTION).usage_metadata["output_tokens"] > 0)
    check(f"{name}.batch", lambda: len(chat.batch([QUESTION, QUESTION])) == 2)
for name, chat in {"ChatOpenAI": openai, "ChatAnthropic": anthropic}.items():
    check(
        f"{name}.bind_tools",
        lambda: chat.bind_tools([TOOL], tool_choice="any").invoke(QUESTION).tool_calls[0]["args"]["name"],
    )
check(
    "ChatOpenAI.with_structured_output",
    lambda: openai.with_structured_output(SCHEMA).invoke(QUESTION)["name"] == "Paris",
)
check("ChatAnthropic.with_structured_output", lambda: anthropic.with_structured_output(SCHEMA).invoke(QUESTION)["name"])
check(
    "ChatOllama.with_structured_output",
    lambda: ollama.with_structured_output(SCHEMA).invoke(QUESTION)["name"] == "Paris",
)
# The protocol cannot force a call: tools are offered, and a call with its result is read from the history.
visited = ToolMessage("It was a fine visit.", tool_call_id="1")
called = AIMessage("", tool_calls=[{"name": "visit", "args": {"name": "Paris"}, "id": "1"}])
check(
    "ChatOllama.bind_tools",
    lambda: ollama.bind_tools([TOOL]).invoke([HumanMessage(QUESTION), called, visited]).response_metadata,
)
for name, chat in make_chats("other", 5).items():
    check(f"{name}: an unknown model", lambda: "does not exist" in error_text(lambda: chat.invoke("hi")))
for name, chat in make_chats(MODEL, 2000).items():
    check(f"{name}: a stream that is left", lambda: leave_stream(chat))
    check(f"{name}.ainvoke, cancelled", lambda: asyncio.run(cancel(chat)))
