"""Before a request is queued: prompts are rendered and grammars compiled for all clients, in threads they share."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from mlxrt import EngineConfig

from .conftest import Server, running, wait_for
from .test_cases import CLAUDE_TOOLS, COUNT, HI, SCHEMA, ask

WITH_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}


class Gate:
    """Replaces a method by one that waits until it is opened, and counts who came."""

    def __init__(self, work):
        self.work, self.opened, self.entered = work, threading.Event(), []

    def __call__(self, request):
        self.entered.append(request)
        assert self.opened.wait(60)
        return self.work(request)


@contextmanager
def held_back(monkeypatch, server: Server, method: str) -> Iterator[tuple[Gate, ThreadPoolExecutor]]:
    """A gate before a method of the engine, and threads to ask from."""
    gate = Gate(getattr(server.engine, method))
    monkeypatch.setattr(server.engine, method, gate)
    with ThreadPoolExecutor(4) as clients:
        try:
            yield gate, clients
        finally:
            gate.opened.set()


def test_slow_grammars_delay_no_other_prompt(monkeypatch):
    with running() as server, held_back(monkeypatch, server, "compile_grammar") as (gate, clients):
        slow = [clients.submit(server.chat, **WITH_SCHEMA) for _ in range(3)]
        wait_for(lambda: len(gate.entered) >= 2)
        plain = clients.submit(server.chat)
        assert plain.result(30).status_code == 200 and not any(call.done() for call in slow)
        gate.opened.set()
        assert [call.result(60).status_code for call in slow] == [200] * 3


def test_no_more_calls_are_prepared_than_the_queue_holds(monkeypatch):
    config = EngineConfig(chunk=16, max_queue=1)
    with running(config=config) as server, held_back(monkeypatch, server, "encode") as (gate, clients):
        first = clients.submit(server.chat)
        wait_for(lambda: gate.entered)
        for path, body in (("/v1/chat/completions", ask()), (COUNT, ask(COUNT))):
            refused = clients.submit(server.post, path, body).result(30)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "the queue holds 1" in refused.json()["error"]["message"]
        gate.opened.set()
        assert first.result(60).status_code == 200 and server.chat().status_code == 200


def test_a_client_that_leaves_is_not_prepared(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mlxrt.server")
    logging.getLogger("mlxrt").propagate = True
    with running(log_prompts=True) as server, held_back(monkeypatch, server, "encode") as (gate, clients):
        staying = [clients.submit(server.chat) for _ in range(2)]
        wait_for(lambda: len(gate.entered) == 2)  # every thread is taken
        body = json.dumps({"model": "toy", "messages": HI, "max_tokens": 8}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: leaving\r\n"
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            wait_for(lambda: any(r.getMessage().startswith("leaving: asked") for r in caplog.records))
        wait_for(lambda: any(r.getMessage().endswith("leaving") for r in caplog.records))
        gate.opened.set()
        assert [call.result(60).status_code for call in staying] == [200, 200]
        assert server.chat().status_code == 200 and len(gate.entered) == 3


def test_tokens_are_counted_as_other_prompts_are_prepared(monkeypatch):
    """Off the event loop, in the threads for that; no grammar is compiled for an answer that nobody asked for."""
    with running(config=EngineConfig(chunk=16, tool_parser="hermes")) as server:
        threads: list[str] = []
        encode = server.engine.encode
        monkeypatch.setattr(
            server.engine, "encode", lambda r: (threads.append(threading.current_thread().name), encode(r))[1]
        )
        monkeypatch.setattr(server.engine, "compile_grammar", lambda request: 1 / 0)
        answer = server.post(COUNT, ask(COUNT, tools=CLAUDE_TOOLS))
        assert answer.status_code == 200 and answer.json()["input_tokens"] > 0
        assert len(threads) == 1 and threads[0].startswith("mlxrt prepare")
