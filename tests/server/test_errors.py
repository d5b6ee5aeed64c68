"""What is wrong with a request, in the words and statuses that clients match; and the server answers the next one."""

import httpx
import openai
import pytest

from mlxrt import EngineConfig
from mlxrt.errors import EngineFailed, QueueFull
from mlxrt.server.problem import describe

from ..long.fuzz_server import fuzz
from .conftest import running, wait_for

GOOD = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BAD = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include": True}}, "stream_options.include"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"name": "f"}]}, "tools[0]"),
    ({"functions": []}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"made_up": 1}, "made_up"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=[param for _, param in BAD])
def test_a_bad_field_is_named(server, change, param):
    answer = server.post("/v1/chat/completions", GOOD | change)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["message"].startswith(param)


def test_fields_without_effect_are_named_in_a_header(server):
    answer = server.post("/v1/chat/completions", GOOD | {"user": "me", "metadata": {"a": "b"}})
    assert answer.status_code == 200 and answer.headers["x-mlxrt-ignored"] == "user, metadata"


def test_a_clients_words_in_a_header_are_made_safe(server):
    body = {"model": "toy", "input": "x", "max_output_tokens": 2, "tools": [{"type": "\U0010ffff\r\nx-forged: 1"}]}
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200 and "x-forged" not in answer.headers
    assert answer.headers["x-mlxrt-ignored"] == "tools[0] (???x-forged: 1)"


def test_the_shape_is_each_protocols_own(server):
    long = [{"role": "user", "content": "x" * 2000}]
    chat = server.post("/v1/chat/completions", GOOD | {"messages": long})
    claude = server.post("/v1/messages", {"model": "toy", "max_tokens": 5, "messages": long})
    llama = server.post("/api/chat", {"model": "toy", "messages": long})
    assert [r.status_code for r in (chat, claude, llama)] == [400, 400, 400]
    assert chat.json()["error"]["code"] == "context_length_exceeded"
    assert chat.json()["error"]["message"].startswith("This model's maximum context length is 512 tokens")
    assert claude.json()["error"]["type"] == "invalid_request_error"
    assert claude.json()["error"]["message"].startswith("prompt is too long: ")
    assert claude.json()["request_id"] == claude.headers["request-id"]
    assert isinstance(llama.json()["error"], str)


def test_unknown_models_paths_and_methods(server):
    assert server.post("/v1/chat/completions", GOOD | {"model": "other"}).json()["error"]["code"] == "model_not_found"
    assert server.post("/api/chat", GOOD | {"model": "other"}).status_code == 404
    assert server.get("/v1/nothing").status_code == 404 and server.get("/v1/messages").status_code == 405
    assert server.post("/v1/embeddings", {"input": "x"}).status_code == 501
    assert server.post("/api/pull", {"model": "other"}).status_code == 501
    stored = server.post("/v1/responses", {"model": "toy", "input": "x", "previous_response_id": "resp_1"})
    assert stored.status_code == 400 and stored.json()["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"a":' * 3000, b"1e999", b"null", b'"x"'])
def test_a_body_that_is_no_json_object(server, raw):
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=raw)
    assert answer.status_code == 400 and "error" in answer.json()


def test_engine_errors_have_their_status():
    assert describe(QueueFull("full")).status == 429 and "retry-after" in describe(QueueFull("full")).headers
    failed = describe(EngineFailed("x"))
    assert failed.status == 503 and failed.headers["x-should-retry"] == "false"
    assert describe(KeyError("secret")).message == "internal error: KeyError"


def test_a_full_queue_is_429_and_recovers():
    with running(config=EngineConfig(chunk=16, max_queue=1, max_running=1)) as server:
        server.script += ["z" * 400] * 3
        server.slow_down(0.02)
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=GOOD | {"max_tokens": 400, "stream": True}
        ) as one:
            reading = one.iter_text()  # kept: httpx closes the connection with it
            next(reading)
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=GOOD | {"stream": True}, timeout=60):
                refused = server.post("/v1/chat/completions", GOOD)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        wait_for(lambda: not server.engine.core.busy)
        server.script.clear()
        assert server.post("/v1/chat/completions", GOOD).status_code == 200


@pytest.mark.parametrize("call", ["chat/completions", "completions"])
def test_a_call_that_no_queue_ever_has_room_for_is_400(call):
    """Not 429, which clients would send again for good."""
    asked = GOOD | {"n": 5} if call.startswith("chat") else {"prompt": ["a"] * 5, "max_tokens": 2}
    with running(config=EngineConfig(chunk=16, max_queue=4)) as server:
        refused = server.post(f"/v1/{call}", asked)
        assert refused.status_code == 400 and "5 answers in one call" in refused.json()["error"]["message"]
        fewer = GOOD | {"n": 4} if "n" in asked else asked | {"prompt": ["a"] * 4}
        assert server.post(f"/v1/{call}", fewer).status_code == 200


def test_a_failure_in_the_middle_of_a_stream_is_an_error_frame():
    with running() as server:
        server.script.append("z" * 300)
        server.slow_down(0.01)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused-key", max_retries=0)
        with pytest.raises(openai.APIError, match="boom"):
            for i, _ in enumerate(client.chat.completions.create(**GOOD | {"max_tokens": 300}, stream=True)):
                if i == 3:
                    server.engine.core.runner.launch = fail
        wait_for(lambda: server.result)
        assert server.result == [1]  # the process ends with an error: it must not look alive


def fail(step):
    raise RuntimeError("boom")


def test_a_failed_engine_can_be_loaded_again():
    with running(restart=True) as server:
        server.engine.core.runner.launch = fail
        assert server.post("/v1/chat/completions", GOOD).status_code == 503
        wait_for(lambda: server.get("/health").status_code == 200 and server.models.default.engine is None)
        assert server.post("/v1/chat/completions", GOOD).status_code == 200


def test_mutated_requests_never_fail_the_server():
    """A part of what `python -m tests.long.fuzz_server` sends."""
    with running(config=EngineConfig(chunk=16, max_context=160)) as server:
        assert fuzz(server, 80, seed=1) == []


@pytest.mark.parametrize("host", ["[::1", "[zz]", "[", "a]b", ""])
def test_a_host_that_is_no_address_is_refused(server, host):
    assert server.get("/health", headers={"host": host}).status_code in (400, 403)
    assert server.get("/health", headers={"origin": f"http://{host}"}).status_code in (400, 403)
