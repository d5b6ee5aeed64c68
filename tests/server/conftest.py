"""A server in this process, on a port of its own, with a toy model that a test may script token by token."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest

from mlxrt import AsyncEngine, Engine, EngineConfig
from mlxrt.engine import Source
from mlxrt.server.access import AccessRules
from mlxrt.server.run import Address, Runner, ServeOptions
from mlxrt.server.served_models import ServedModels
from tests.support.state_machine.kinds import model, tokenizer


class ScriptedEngine(AsyncEngine):
    """Answers with the texts of `script`, one after the other, as tokens of the real engine."""

    def __init__(self, engine: Engine, script: list[str]):
        super().__init__(engine)
        self.script = script

    def stream_encoded(self, requests, prompts):
        if self.script:
            requests = [replace(request, on_logits=self.follow(self.script.pop(0))) for request in requests]
        return super().stream_encoded(requests, prompts)

    def follow(self, text: str):
        tokens = [*self.engine.tokenizer.encode(text, special=False), *self.engine.source.eos]
        return lambda row: row.allow([tokens[min(len(row.output_tokens), len(tokens) - 1)]])


@dataclass
class Server:
    url: str
    models: ServedModels
    script: list[str]
    result: list[int]
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    @property
    def engine(self) -> Engine:
        return self.models.default.engine.engine

    def slow_down(self, seconds: float) -> None:
        """Every step takes so much longer."""
        runner = self.engine.core.runner
        launch = runner.launch
        runner.launch = lambda step: (time.sleep(seconds), launch(step))[1]

    def post(self, path: str, body=None, **options) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def chat(self, text: str = "hello", **options) -> httpx.Response:
        body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **options}
        return self.post("/v1/chat/completions", body)


@contextmanager
def running(
    rules: AccessRules = AccessRules(),  # noqa: B008
    config: EngineConfig = EngineConfig(chunk=16),  # noqa: B008
    names: tuple[str, ...] = ("toy",),
    load=None,
    restart: bool = False,
    log_prompts: bool = False,
    grace_s: float = 60,  # for the busiest machine
    **options,
) -> Iterator[Server]:
    script: list[str] = []

    def load_toy(source: str, config: EngineConfig) -> AsyncEngine:
        made = Engine(model(source), config, tokenizer(), Source("toy", eos=frozenset({257})))
        return ScriptedEngine(made, script)

    models = ServedModels(dict.fromkeys(names, "full"), config, load or load_toy, **options)
    started, result = threading.Event(), []
    lines: list[str] = []

    def announce(line: str) -> None:
        lines.append(line)
        started.set()

    def work() -> None:
        serving = ServeOptions(Address(port=0), rules, grace_s=grace_s, restart=restart, log_prompts=log_prompts)
        runner = Runner(models, serving, announce)

        async def main() -> int:
            return await runner.run()

        result.append(asyncio.run(main()))
        started.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(60)
    server = Server(lines[0].split()[0] if lines else "", models, script, result)
    try:
        yield server
    finally:
        server.client.close()
        models.stop()
        thread.join(90)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
