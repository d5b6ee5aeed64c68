"""LangChain: ChatOpenAI, ChatAnthropic, ChatOllama."""

# ruff: noqa: B023  a call is made at once
from calls import MODEL, QUESTION, SCHEMA, TOOL, URL, check, raises
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

openai = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="unused-key", max_tokens=40, max_retries=0)
anthropic = ChatAnthropic(model_name=MODEL, base_url=URL, api_key="unused-key", max_tokens=40, max_retries=0)
ollama = ChatOllama(model=MODEL, base_url=URL, num_predict=20)
for name, chat in {"ChatOpenAI": openai, "ChatAnthropic": anthropic, "ChatOllama": ollama}.items():
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
check(
    "ChatOpenAI: an unknown model",
    lambda: raises(
        Exception,
        lambda: ChatOpenAI(model="other", base_url=f"{URL}/v1", api_key="x-unused", max_retries=0).invoke("hi"),
    ),
)
