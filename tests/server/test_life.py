"""The life of a request: clients that leave, cancel or read slowly; models that come and go; a graceful end."""

import json
import socket
import threading

import httpx

from mlxrt.server.access import AccessRules

from .conftest import running, wait_for

LONG = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}


def idle(server) -> bool:
    core = server.engine.core
    return not core.busy and not core.outputs.states


def test_a_client_that_leaves_a_stream_ends_its_request(server):
    server.script.append("z" * 400)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=LONG | {"stream": True}) as answer:
        next(answer.iter_text())
    wait_for(lambda: idle(server))
    assert server.engine.stats().finished.get("cancelled", 0) >= 1


def test_a_client_that_leaves_a_plain_call_ends_its_request(server):
    before = server.engine.stats().finished.get("cancelled", 0)
    server.script.append("z" * 400)
    body = json.dumps(LONG).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        wait_for(lambda: server.engine.core.busy)
    wait_for(lambda: idle(server))
    assert server.engine.stats().finished["cancelled"] == before + 1


def test_a_request_is_cancelled_by_its_id(server):
    server.script.append("z" * 400)
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=LONG | {"stream": True}, headers={"x-request-id": "stop-me"}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert httpx.delete(f"{server.url}/v1/requests/stop-me").json() == {"id": "stop-me", "cancelled": True}
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"stop"' in rest[-2]
    assert server.post("/v1/requests/stop-me/cancel").status_code == 404


def stream_as(server, id: str, text: str, **headers: str):
    """A streamed answer of `text`, under an id of the client's choice."""
    server.script.append(text)
    body, url = LONG | {"stream": True}, f"{server.url}/v1/chat/completions"
    return httpx.stream("POST", url, json=body, headers={"x-request-id": id, **headers})


def test_requests_with_one_id_are_cancelled_together():
    """One that has ended takes none of the others with it."""
    url = "/v1/requests/twice/cancel"
    with running() as server:
        server.slow_down(0.01)
        with stream_as(server, "twice", "a" * 400) as one, stream_as(server, "twice", "b" * 400) as two:
            lines = [one.iter_lines(), two.iter_lines()]
            assert all(next(answer) for answer in lines)
            with stream_as(server, "twice", "c") as three:
                assert list(three.iter_lines())[-2] == "data: [DONE]"
            assert server.post(url).json() == {"id": "twice", "cancelled": True}
            for answer in lines:
                rest = [line for line in answer if line]
                assert rest[-1] == "data: [DONE]" and '"finish_reason":"stop"' in rest[-2] and len(rest) < 300
        wait_for(lambda: server.post(url).status_code == 404)
        assert server.engine.stats().finished["cancelled"] == 2


def test_isolated_keys_cancel_their_own_requests_only():
    mine, other = {"x-api-key": "a-secret-key"}, {"x-api-key": "another-secret-key"}
    for isolate in (True, False):
        with running(AccessRules(keys=("a-secret-key", "another-secret-key"), isolate=isolate)) as server:
            server.slow_down(0.01)
            with stream_as(server, "guessed", "a" * 400, **mine) as answer:
                lines = answer.iter_lines()  # kept: httpx closes the connection with it
                next(lines)
                refused = server.post("/v1/requests/guessed/cancel", headers=other)
                assert refused.status_code == (404 if isolate else 200)
                if isolate:
                    assert server.post("/v1/requests/guessed/cancel", headers=mine).status_code == 200
            wait_for(lambda: idle(server))


def test_models_load_on_demand_and_make_space(server):
    with running(names=("one", "two")) as two:
        assert two.models.models["two"].engine is None
        assert two.chat(model="two").status_code == 200
        assert two.models.models["one"].engine is None and two.models.models["two"].engine is not None
        assert [m["id"] for m in two.get("/v1/models").json()["data"]] == ["one", "two"]
        assert two.chat(model="one:latest").status_code == 200


def test_an_idle_model_is_unloaded_and_comes_back():
    with running(idle_s=0.2) as server:
        assert server.chat().status_code == 200
        wait_for(lambda: server.models.default.engine is None)
        assert server.chat().status_code == 200


def test_aliases_and_any_name():
    with running(aliases=("gpt-4o",), any_name=False) as server:
        assert server.chat(model="gpt-4o").status_code == 200 and server.chat(model="gpt-5").status_code == 404
    with running(any_name=True) as server:
        assert server.chat(model="claude-sonnet").status_code == 200


def test_running_answers_are_finished_at_shutdown():
    with running() as server:
        server.script.append("y" * 60)
        server.slow_down(0.005)
        found: list[str] = []

        def read() -> None:
            found.append(server.chat(max_tokens=300).json()["choices"][0]["message"]["content"])

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: server.engine.core.busy)
        server.models.stop()
        reader.join(90)
        assert found == ["y" * 60]
    assert server.result == [0]


def test_answers_that_take_longer_than_the_grace_are_told_so():
    with running(grace_s=0.1) as server:
        server.script += ["y" * 400] * 2
        server.slow_down(0.05)
        plain: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: plain.append(server.chat(max_tokens=400)))
        asking.start()
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            wait_for(lambda: len(server.engine.core.outputs.states) == 2)
            server.models.stop()
            rest = [line for line in lines if line]
        asking.join(60)
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "unavailable_error"
    assert plain[0].status_code == 503 and plain[0].json()["error"]["type"] == "unavailable_error"
    assert server.result == [0]


def test_metrics_count_what_happened():
    with running() as server:
        for _ in range(3):
            server.chat()
        wanted = (
            'vllm:request_success_total{finished_reason="length"} 3', "vllm:generation_tokens_total 24",
            "vllm:time_to_first_token_seconds_count 3", 'vllm:num_requests_running{model_name="toy"} 0',
        )  # fmt: skip
        # A client has its answer before all is counted.
        wait_for(lambda: all(line in server.get("/metrics").text for line in wanted))


def test_the_prefix_cache_is_shown_warmed_and_cleared():
    with running() as server:
        question = [{"role": "user", "content": "a question to warm " * 5}]
        warmed = server.post("/v1/cache/warm", {"model": "toy", "messages": question}).json()
        assert warmed["cached"] > 64
        used = server.chat(messages=question).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert used >= warmed["cached"] - 16
        assert server.get("/v1/cache").json()["models"]["toy"]["nodes"] > 0
        httpx.delete(f"{server.url}/v1/cache")
        assert server.get("/v1/cache").json()["models"]["toy"]["nodes"] == 0


def test_a_prefix_that_does_not_fit_is_not_warmed(server):
    answer = server.post("/v1/cache/warm", {"model": "toy", "prompt": "x" * 600})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_warming_shares_the_steps_with_answers(monkeypatch):
    with running() as server:
        asked, open_gate, ended = [], threading.Event(), []
        engine, runner, scheduler = (
            server.models.default.engine,
            server.engine.core.runner,
            server.engine.core.scheduler,
        )
        stream, launch, finish = engine.stream_encoded, runner.launch, scheduler.finish
        monkeypatch.setattr(engine, "stream_encoded", lambda *given: (stream(*given), asked.append(given[0]))[0])
        monkeypatch.setattr(runner, "launch", lambda step: (open_gate.wait(60), launch(step))[1])
        monkeypatch.setattr(scheduler, "finish", lambda *given: (ended.append(len(given[0].prompt)), finish(*given))[1])
        body = {"model": "toy", "prompt": "w" * 400}
        calls = [lambda: server.chat(max_tokens=8), lambda: server.post("/v1/cache/warm", body)]
        threads = [threading.Thread(target=call) for call in calls]
        for i, thread in enumerate(threads):
            thread.start()
            wait_for(lambda: len(asked) > i)  # noqa: B023
        open_gate.set()
        for thread in threads:
            thread.join(60)
        assert len(ended) == 2 and ended[0] < 100 < ended[1] == 400


def test_a_model_in_use_is_unloaded_afterwards():
    with running() as server:
        server.script.append("z" * 100)
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            unloaded = server.post("/api/generate", {"model": "toy", "keep_alive": 0}).json()
            assert unloaded["done_reason"] == "unload" and list(lines)[-2] == "data: [DONE]"
        wait_for(lambda: server.models.default.engine is None)


def test_the_page_is_served_and_ollamas_words_too(server):
    page = server.get("/", headers={"accept": "text/html"})
    assert "<title>mlxrt</title>" in page.text and "default-src 'self'" in page.headers["content-security-policy"]
    assert server.get("/").text == "Ollama is running" and httpx.head(server.url).status_code == 200
    for name in ("app.js", "style.css", "markdown.js", "icon.svg"):
        assert server.get(f"/page/{name}").status_code == 200
    for name in ("..%2frun.py", "nothing.js", "%2e%2e%2frun.py"):
        assert server.get(f"/page/{name}").status_code == 404


def test_keep_alives_come_by_the_clock(monkeypatch):
    monkeypatch.setattr("mlxrt.server.answering.KEEP_ALIVE_S", 0.05)
    with running() as slow:
        slow.slow_down(0.3)
        assert ": keep-alive" in slow.chat(stream=True, max_tokens=2).text


def test_a_time_limit_in_a_header_ends_an_answer_with_what_it_has(server):
    server.script.append("z" * 400)
    body = LONG | {"stream": False}
    short = server.post("/v1/chat/completions", body, headers={"x-request-timeout": "0.05"})
    assert short.status_code == 200 and short.json()["choices"][0]["finish_reason"] == "length"
    assert len(short.json()["choices"][0]["message"]["content"]) < 400
    for wrong in ("soon", "-1", "nan"):
        refused = server.post("/v1/chat/completions", LONG, headers={"x-request-timeout": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-request-timeout"


def test_a_reader_that_takes_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr("mlxrt.server.access.SEND_TIMEOUT_S", 0.3)
    with running() as server:
        body = json.dumps(LONG | {"stream": True, "n": 16, "ignore_eos": True, "max_tokens": 480}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        host, port = server.url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with connection:
            connection.connect((host, int(port)))
            connection.sendall(head + body)
            wait_for(lambda: server.engine.core.busy)
            wait_for(lambda: idle(server), 60)
        assert server.engine.stats().finished.get("cancelled", 0) >= 1


def test_prompts_are_rendered_off_the_engines_thread(server, monkeypatch):
    threads: list[str] = []
    encode = server.engine.encode
    monkeypatch.setattr(
        server.engine, "encode", lambda request: (threads.append(threading.current_thread().name), encode(request))[1]
    )
    assert server.chat(n=3).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("mlxrt prepare")


def test_a_first_model_that_cannot_be_loaded_ends_the_server():
    def load(source: str, config):
        raise RuntimeError("boom")

    with running(load=load) as server:
        assert server.url == "" and server.result == [1]
