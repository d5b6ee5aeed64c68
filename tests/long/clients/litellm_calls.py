"""LiteLLM, through three protocols."""

# ruff: noqa: B023  a call is made at once
import json
from functools import partial

import litellm
from calls import MODEL, QUESTION, SCHEMA, STORY, TOOL, URL, becomes_idle, check, raises

MESSAGES = [{"role": "user", "content": QUESTION}]
PROTOCOLS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "unused-key"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "unused-key"},
    "ollama_chat": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
}


def give_up(**options) -> bool:
    """A call whose client waits two seconds. Streams are not left here: LiteLLM closes them when it pleases."""
    messages, late = [{"role": "user", "content": STORY}], (litellm.Timeout, litellm.APIConnectionError)
    call = partial(litellm.completion, **options, messages=messages, max_tokens=2000, timeout=2)
    return raises(late, call) and becomes_idle()


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
        lambda: raises(litellm.NotFoundError, lambda: litellm.completion(**given | {"model": options["model"] + "x"})),
    )
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    check(
        f"{name}: response_format",
        lambda: json.loads(
            litellm.completion(**given | {"max_tokens": 60}, response_format=form).choices[0].message.content
        )["name"],
    )
    tools = given | {"tools": [TOOL], "max_tokens": 60}
    if name == "ollama_chat":  # its protocol cannot force a call
        check(f"{name}: tools are offered", lambda: litellm.completion(**tools).choices[0].message)
    else:
        check(
            f"{name}: tools",
            lambda: json.loads(
                litellm.completion(**tools, tool_choice="required").choices[0].message.tool_calls[0].function.arguments
            )["name"],
        )
    check(f"{name}: a call that is given up", lambda: give_up(**options, num_retries=0))
given = {**PROTOCOLS["openai"], "messages": MESSAGES, "max_tokens": 30, "num_retries": 0}
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
