"""LiteLLM, through three protocols."""

# ruff: noqa: B023  a call is made at once
import json

import litellm
from calls import MODEL, QUESTION, SCHEMA, TOOL, URL, check, raises

MESSAGES = [{"role": "user", "content": QUESTION}]
PROTOCOLS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "unused-key"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "unused-key"},
    "ollama_chat": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
}
for name, options in PROTOCOLS.items():
    given = {**options, "messages": MESSAGES, "max_tokens": 20, "num_retries": 0}
    check(f"{name}: completion", lambda: "Paris" in litellm.completion(**given).choices[0].message.content)
    check(
        f"{name}: completion, stream",
        lambda: "Paris" in "".join(c.choices[0].delta.content or "" for c in litellm.completion(**given, stream=True)),
    )
    check(f"{name}: usage", lambda: litellm.completion(**given).usage.completion_tokens > 0)
    check(
        f"{name}: NotFoundError",
        lambda: raises(Exception, lambda: litellm.completion(**given | {"model": options["model"] + "x"})),
    )
    tools = given | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    if name != "ollama_chat":
        check(
            f"{name}: tools",
            lambda: json.loads(litellm.completion(**tools).choices[0].message.tool_calls[0].function.arguments)["name"],
        )
given = {**PROTOCOLS["openai"], "messages": MESSAGES, "max_tokens": 30, "num_retries": 0}
form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
check(
    "openai: response_format",
    lambda: json.loads(litellm.completion(**given, response_format=form).choices[0].message.content)["name"] == "Paris",
)
check(
    "openai: text completion",
    lambda: (
        litellm.text_completion(
            model=f"text-completion-openai/{MODEL}",
            api_base=f"{URL}/v1",
            api_key="x-unused",
            prompt="The capital of France is",
            max_tokens=4,
        )
        .choices[0]
        .text
    ),
)
long = [{"role": "user", "content": "word " * 9000}]
check(
    "openai: ContextWindowExceededError",
    lambda: raises(litellm.ContextWindowExceededError, lambda: litellm.completion(**given | {"messages": long})),
)
