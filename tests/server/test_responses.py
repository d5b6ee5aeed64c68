"""/v1/responses: a stream and a plain answer say the same of what became of an answer and its calls."""

import json
import threading

import httpx
import openai
import pytest

from mlxrt import EngineConfig

from .conftest import Server, running, wait_for
from .test_cases import CALL, CHAT, FLAT_TOOLS, HI, RESPONSES, THOUGHT, ask

BEGUN = '{"name": "weather", "parameters": {"city": "Bo'


def read_events(text: str) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def respond(server: Server, says: str, **fields) -> tuple[dict, list[dict]]:
    """The plain answer, and the events of the streamed one."""
    server.script[:] = [says, says]
    plain = server.post(RESPONSES, ask(RESPONSES, **fields)).json()
    return plain, read_events(server.post(RESPONSES, ask(RESPONSES, stream=True, **fields)).text)


@pytest.mark.parametrize(
    ("parser", "says", "limit", "ends"),
    [("hermes", CALL, 52, "incomplete"), ("llama3_json", BEGUN, 200, "completed")],
    ids=["cut off", "dropped"],
)
def test_a_call_that_is_not_whole_is_incomplete(parser, says, limit, ends):
    with running(config=EngineConfig(chunk=64, tool_parser=parser)) as server:
        plain, events = respond(server, says, tools=FLAT_TOOLS, max_output_tokens=limit)
    assert [item["type"] for item in plain["output"]] == ["message"] and plain["status"] == ends
    final = events[-1]["response"]
    call, message = final["output"]
    assert events[-1]["type"] == f"response.{ends}" and final["status"] == ends
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "incomplete")
    assert message["content"][0]["text"] == plain["output"][0]["content"][0]["text"] == says[:limit]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert not [e for e in events if e["type"] == "response.function_call_arguments.done"]


def test_calls_that_are_whole_are_completed():
    with running(config=EngineConfig(chunk=64, tool_parser="hermes")) as server:
        plain, events = respond(server, f"{CALL}\n{CALL}", tools=FLAT_TOOLS, max_output_tokens=300)
    final = events[-1]["response"]
    for output in (plain["output"], final["output"]):
        assert [(i["type"], i["status"]) for i in output] == [("function_call", "completed")] * 2
    assert [i["arguments"] for i in plain["output"]] == [i["arguments"] for i in final["output"]]
    assert len([e for e in events if e["type"] == "response.function_call_arguments.done"]) == 2


def ask_and_cancel(server: Server, path: str, body: dict) -> str:
    """The answer to a request that is cancelled as soon as it runs."""
    server.script[:] = ["z" * 400]
    found: list[httpx.Response] = []
    headers = {"x-request-id": "stop-me"}
    asking = threading.Thread(target=lambda: found.append(server.post(path, body, headers=headers)))
    asking.start()
    wait_for(lambda: httpx.delete(f"{server.url}/v1/requests/stop-me").status_code == 200)
    asking.join(60)
    return found[0].text


def test_a_cancelled_answer_has_one_status_streamed_or_not():
    with running() as server:
        server.slow_down(0.02)
        body = ask(RESPONSES, max_output_tokens=400)
        plain = json.loads(ask_and_cancel(server, RESPONSES, body))
        streamed = read_events(ask_and_cancel(server, RESPONSES, body | {"stream": True}))[-1]
        lines = [
            ask_and_cancel(server, "/api/chat", {"model": "toy", "messages": HI, "stream": stream})
            for stream in (False, True)
        ]
    assert streamed["type"] == "response.completed"
    for response in (plain, streamed["response"]):
        assert (response["status"], response["incomplete_details"]) == ("completed", None)
        assert response["usage"]["output_tokens"] < 400
    assert [json.loads(text.splitlines()[-1])["done_reason"] for text in lines] == ["stop", "stop"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"timeout": 0.05, "max_output_tokens": 400}, "timeout"), ({"max_output_tokens": 3}, "max_output_tokens")],
)
def test_an_incomplete_answer_says_why(fields, reason):
    with running() as server:
        server.slow_down(0.02)
        plain, events = respond(server, "z" * 400, **fields)
    assert events[-1]["type"] == "response.incomplete"
    for response in (plain, events[-1]["response"]):
        assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": reason}


def test_reasoning_is_counted_alike_streamed_or_not():
    with running(config=EngineConfig(chunk=64, reasoning_parser="think")) as server:
        plain, events = respond(server, THOUGHT, max_output_tokens=80)
        bodies = [ask(max_tokens=80), ask(max_tokens=80, stream=True, stream_options={"include_usage": True})]
        server.script[:] = [THOUGHT, THOUGHT]
        whole, stream = (server.post(CHAT, body) for body in bodies)
        follow = server.models.default.engine.follow(THOUGHT)
        expected = server.engine.generate(HI, max_tokens=80, on_logits=follow).timings.reasoning_tokens
    counted = [r["usage"]["output_tokens_details"]["reasoning_tokens"] for r in (plain, events[-1]["response"])]
    usages = [whole.json()["usage"], read_events(stream.text)[-1]["usage"]]
    counted += [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert counted == [expected] * 4 and expected > 0


def test_a_response_may_be_sent_back():
    """As OpenAI's package does it: every field of the items that an answer had."""
    config = EngineConfig(chunk=64, reasoning_parser="think", tool_parser="hermes")
    with running(config=config) as speaking:
        client = openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="unused-key", max_retries=0)
        speaking.script[:] = [f"<think>\nhm\n</think>\n\nlet me see {CALL}", "it is sunny", "it is sunny"]
        asked = {"model": "toy", "tools": FLAT_TOOLS, "max_output_tokens": 200}
        first = client.responses.create(input="hi", **asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}
        for items in (list(first.output), [item.model_dump() for item in first.output]):
            history = [{"role": "user", "content": "hi"}, *items, result]
            answer = client.responses.with_raw_response.create(input=history, **asked)
            assert answer.parse().output_text == "it is sunny" and "x-mlxrt-ignored" not in answer.headers


def test_a_response_with_a_parsed_call_may_be_sent_back():
    with running(config=EngineConfig(chunk=64, tool_parser="hermes")) as speaking:
        client = openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="unused-key", max_retries=0)
        speaking.script[:] = [CALL, "it is sunny"]
        with client.responses.stream(model="toy", input="hi", tools=FLAT_TOOLS, max_output_tokens=200) as stream:
            [call] = stream.get_final_response().output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        history = [{"role": "user", "content": "hi"}, call.model_dump(), result]
        assert client.responses.create(model="toy", input=history, max_output_tokens=40).output_text == "it is sunny"
