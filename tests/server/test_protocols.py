"""Every protocol gives the engine's tokens, in the frames its own clients read."""

import json

import anthropic
import ollama
import openai
import pytest

from mlxrt import EngineConfig

from .conftest import running
from .test_cases import CLAUDE_TOOLS

MESSAGES = [{"role": "user", "content": "hello"}]


def alone(server, **options) -> str:
    return server.engine.generate(MESSAGES, max_tokens=12, **options).text


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused-key", max_retries=0)


@pytest.fixture
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="unused-key", max_retries=0)


@pytest.fixture
def llama(server):
    return ollama.Client(server.url)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}])
def test_openai_chat_equals_the_engine(server, client, sampling):
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=12, **sampling)
    chunks = list(
        client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=12, stream=True, **sampling)
    )
    assert answer.choices[0].message.content == alone(server, **sampling)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == alone(server, **sampling)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)


def test_openai_usage_is_sent_once_and_only_if_asked(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=3, **options))
    told = [c for c in chunks if c.usage is not None]
    assert len(told) == 1 and told[0].choices == [] and told[0] is chunks[-1]
    assert told[0].usage.completion_tokens == 3
    assert told[0].usage.total_tokens == told[0].usage.prompt_tokens + 3


def test_openai_several_choices_draw_differently_and_the_first_as_alone(server, client):
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    many = client.chat.completions.create(model="toy", messages=MESSAGES, n=3, **options)
    texts = [choice.message.content for choice in many.choices]
    assert texts[0] == alone(server, temperature=1.0, seed=3) and len(set(texts)) == 3


def test_openai_log_probabilities_are_the_engines(server, client):
    answer = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=4)
    own = server.engine.generate(MESSAGES, max_tokens=3, logprobs=4).logprobs
    for step, told in zip(own, answer.choices[0].logprobs.content, strict=True):
        assert told.logprob == pytest.approx(step[0][1], abs=1e-5) and len(told.top_logprobs) == 4


def test_openai_completions_take_texts_and_tokens(server, client):
    tokens = server.engine.tokenizer.encode("abc")
    answer = client.completions.create(model="toy", prompt=["abc", "xyz"], max_tokens=6, echo=True)
    by_tokens = client.completions.create(model="toy", prompt=tokens, max_tokens=6)
    own = [server.engine.generate(text, max_tokens=6).text for text in ("abc", "xyz")]
    assert [c.text for c in answer.choices] == ["abc" + own[0], "xyz" + own[1]]
    assert by_tokens.choices[0].text == own[0]


def test_openai_responses_whole_and_streamed(server, client):
    whole = client.responses.create(model="toy", input="hello", max_output_tokens=12)
    server.script.append("short")
    with client.responses.stream(model="toy", input="hello", max_output_tokens=12) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert whole.output_text == alone(server) and whole.status == "incomplete"
    assert final.output_text == "short" and final.status == "completed" and kinds[-1] == "response.completed"


def test_anthropic_messages_whole_and_streamed(server, claude):
    server.script += ["it ends", "it ends"]
    whole = claude.messages.create(model="toy", max_tokens=40, messages=MESSAGES)
    with claude.messages.stream(model="toy", max_tokens=40, messages=MESSAGES) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()
    cut = claude.messages.create(model="toy", max_tokens=12, messages=MESSAGES)
    assert whole.content[0].text == text == "it ends"
    assert whole.stop_reason == final.stop_reason == "end_turn" and cut.stop_reason == "max_tokens"
    assert cut.content[0].text == alone(server)
    assert (
        final.usage.input_tokens + final.usage.cache_read_input_tokens
        == claude.messages.count_tokens(model="toy", messages=MESSAGES).input_tokens
    )


def test_ollama_chat_and_generate(server, llama):
    options = {"num_predict": 12}
    whole = llama.chat("toy", MESSAGES, options=options)
    parts = list(llama.chat("toy", MESSAGES, options=options, stream=True))
    raw = llama.generate("toy", "abc", raw=True, options=options)
    assert whole.message.content == "".join(p.message.content for p in parts) == alone(server)
    assert whole.done_reason == "length" and whole.eval_count == 12 and parts[-1].done
    assert raw.response == server.engine.generate("abc", max_tokens=12).text
    assert [m.model for m in llama.list().models] == ["toy"] and llama.ps().models[0].context_length == 512
    assert llama.chat("toy", []).done_reason == "load" and llama.pull("toy").status == "success"


def test_a_conversation_reuses_its_prefix(server, client):
    messages = [{"role": "user", "content": "a long enough question " * 4}]
    for turn in range(3):
        answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=8)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert (cached > 64) == (turn > 0)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, MESSAGES[0]]


def test_a_stream_is_exactly_framed(server):
    server.script.append('quo"te\n')
    answer = server.chat(max_tokens=40, stream=True)
    frames = [
        frame for frame in answer.text.split("\n\n") if frame != ": keep-alive"
    ]  # as many as a busy machine needs
    assert frames[-2:] == ["data: [DONE]", ""] and answer.headers["content-type"].startswith("text/event-stream")
    bodies = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert "".join(b["choices"][0]["delta"].get("content", "") for b in bodies) == 'quo"te\n'
    assert [b["choices"][0]["finish_reason"] for b in bodies][-1] == "stop"
    assert len({b["id"] for b in bodies}) == 1 and all(b["object"] == "chat.completion.chunk" for b in bodies)


def test_anthropic_names_the_stop_sequence(server, claude):
    options = {"model": "toy", "max_tokens": 40, "messages": MESSAGES, "stop_sequences": ["never", "END", "ND"]}
    server.script += ["one END two"] * 2
    whole = claude.messages.create(**options)
    with claude.messages.stream(**options) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
        assert message.content[0].text == "one "


def test_anthropic_calls_keep_broken_arguments():
    """Streamed as they come; in a plain answer, and back from the client, in an object."""
    text = '{"city": Bonn}'
    asked = {"model": "toy", "max_tokens": 200, "tools": CLAUDE_TOOLS}
    with running(config=EngineConfig(chunk=64, tool_parser="llama3_json")) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="unused-key", max_retries=0)
        server.script += ['{"name": "weather", "parameters": ' + text + "}"] * 2
        whole = client.messages.create(messages=MESSAGES, **asked)
        streamed = server.post("/v1/messages", {**asked, "messages": MESSAGES, "stream": True}).text
        [call] = whole.content
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "no JSON"}]}
        history = [*MESSAGES, {"role": "assistant", "content": whole.content}, result]
        assert client.messages.create(messages=history, **asked).type == "message"
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == text
    assert call.type == "tool_use" and call.input == {"INVALID_JSON": text} and whole.stop_reason == "tool_use"


def test_openai_responses_repeat_what_was_asked(client):
    tools = [{"type": "function", "name": "f", "description": "", "parameters": {"type": "object"}, "strict": False}]
    asked = {"instructions": "be short", "metadata": {"a": "b"}, "tools": tools, "parallel_tool_calls": False}
    answer = client.responses.create(model="toy", input="hello", max_output_tokens=4, **asked)
    assert answer.instructions == "be short" and answer.metadata == {"a": "b"}
    assert answer.tools[0].name == "f" and answer.parallel_tool_calls is False


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11, "top_p": 0.8, "top_k": 40}]
)
def test_every_protocol_gives_the_engines_tokens(server, sampling):
    """Greedy and drawn, whole and streamed. Anthropic's protocol has no seed."""
    own = server.engine.generate(MESSAGES, max_tokens=24, **sampling)
    raw = server.engine.generate("hello", max_tokens=24, **sampling)
    chat = {"model": "toy", "messages": MESSAGES, **sampling}
    options = {"num_predict": 24, **sampling}
    asked = [
        ("/v1/chat/completions", chat | {"max_tokens": 24}, lambda a: a["choices"][0]["message"]["content"], own),
        ("/v1/completions", sampling | {"prompt": "hello", "max_tokens": 24}, lambda a: a["choices"][0]["text"], raw),
        ("/v1/responses", sampling | {"input": "hello", "max_output_tokens": 24}, read_response, own),
        ("/api/chat", {"messages": MESSAGES, "options": options}, lambda a: a["message"]["content"], own),
        ("/api/generate", {"prompt": "hello", "options": options}, lambda a: a["response"], own),
        ("/api/generate", {"prompt": "hello", "raw": True, "options": options}, lambda a: a["response"], raw),
    ]  # fmt: skip
    if "seed" not in sampling:
        asked.append(("/v1/messages", chat | {"max_tokens": 24}, lambda a: a["content"][0]["text"], own))
    for path, given, read, expected in asked:
        body = {"model": "toy"} | given
        assert read(server.post(path, body | {"stream": False}).json()) == expected.text, path
        assert join_stream(server.post(path, body | {"stream": True}).text) == expected.text, path


def read_response(answer) -> str:
    return answer["output"][0]["content"][0]["text"]


def join_stream(text: str) -> str:
    """The text of a stream, whatever its protocol."""
    found = []
    for line in text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if "{" in line else {}
        delta = event.get("delta")
        if event.get("choices"):
            choice = event["choices"][0]
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        elif isinstance(delta, (str, dict)):
            found.append(delta if isinstance(delta, str) else delta.get("text", ""))
        else:
            found.append(event.get("response", "") if isinstance(event.get("response"), str) else "")
            found.append(event.get("message", {}).get("content") or "" if "done" in event else "")
    return "".join(found)
