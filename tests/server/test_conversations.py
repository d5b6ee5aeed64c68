"""A conversation with tools: every turn reuses what was run before, and each protocol says how much."""

import dataclasses
import json

import pytest

from mlxrt import AsyncEngine, Engine, EngineConfig
from mlxrt.cache.prefix_cache import common_prefix
from mlxrt.engine import Source
from mlxrt.kernels import PLAIN
from tests.support.state_machine.kinds import make_model, tokenizer

from .conftest import ScriptedEngine, running
from .test_cases import CALL, CLAUDE_TOOLS, TOOLS

TURNS = 10
CONFIG = EngineConfig(chunk=64, tool_parser="hermes")


def load_long(script: list[str], kind: str):
    """The toy model with room for a conversation."""

    def load(source: str, config: EngineConfig) -> AsyncEngine:
        model = make_model(kind, PLAIN)
        model.config = dataclasses.replace(model.config, max_position_embeddings=8192)
        return ScriptedEngine(Engine(model, config, tokenizer(), Source("toy", eos=frozenset({257}))), script)

    return load


class Recorder:
    """The prompts that the engine got and the tokens that it ran."""

    def __init__(self, engine: Engine, monkeypatch):
        self.size, self.prompts, self.ran = engine.core.node_size, [], []
        scheduler = engine.core.scheduler
        add, finish = scheduler.add, scheduler.finish
        monkeypatch.setattr(scheduler, "add", lambda *given: (self.prompts.append(given[1]), add(*given))[1])
        monkeypatch.setattr(
            scheduler, "finish", lambda *given: (self.ran.append((*given[0].tokens,)), finish(*given))[1]
        )

    def check(self, cached: int, prompt_tokens: int) -> None:
        """The longest prefix that the prompt shares with an earlier run; down to a block at most, never above."""
        prompt = self.prompts[-1]
        shared = max((common_prefix(prompt, ran) for ran in self.ran[:-1]), default=0)
        assert prompt_tokens == len(prompt)
        assert shared // self.size * self.size <= cached <= shared, (shared, cached)


@pytest.mark.parametrize("kind", ["full", "gemma"])
def test_ten_turns_with_tools_reuse_what_was_run(monkeypatch, kind):
    script: list[str] = []
    with running(config=CONFIG, load=load_long(script, kind)) as server:
        recorder = Recorder(server.engine, monkeypatch)
        messages = [{"role": "user", "content": "what is the weather in Bonn and elsewhere?"}]
        for turn in range(TURNS):
            script[:] = [CALL if turn % 2 == 0 else f"it is sunny, {turn}"]
            answer = server.chat(messages=messages, tools=TOOLS, max_tokens=200).json()
            message, usage = answer["choices"][0]["message"], answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            recorder.check(cached, usage["prompt_tokens"])
            assert (cached > 0) == (turn > 0)
            messages.append(message)
            if turn % 2 == 0:
                assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bonn"}
                id = message["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": id, "content": f"sunny {turn}"})
            else:
                messages.append({"role": "user", "content": f"and tomorrow, {turn}?"})
        for path, read in PROTOCOLS:
            body = {"model": "toy", "tools": CLAUDE_TOOLS if path == "/v1/messages" else TOOLS, "stream": False}
            asked = [{"role": "user", "content": f"a question for {path} " * 4}]
            body |= {"input": asked, "tools": []} if path == "/v1/responses" else {"messages": asked}
            body |= {"max_tokens": 3} if path == "/v1/messages" else {}
            script[:] = ["one", "two"]
            first, second = (server.post(path, body).json() for _ in range(2))
            recorder.check(*read(second))
            assert read(second)[0] > read(first)[0]


PROTOCOLS = [
    ("/v1/messages", lambda a: (read := a["usage"]["cache_read_input_tokens"], read + a["usage"]["input_tokens"])),
    ("/v1/responses", lambda a: (a["usage"]["input_tokens_details"]["cached_tokens"], a["usage"]["input_tokens"])),
]
