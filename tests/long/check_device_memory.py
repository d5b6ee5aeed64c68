"""python -m tests.long.check_device_memory: a full GPU gives typed errors, and the next request is answered.

Models larger than the device, a second engine in what is left of it, and a KV cache that cannot grow: each has to be a
WontFit with what was wanted and what is free in its message. Needs the device alone; fails on anything else.
"""

import sys

import mlxrt

import mlx.core as mx  # isort: skip

from bench.gpu.shapes import make_prompts
from mlxrt import EngineConfig, SamplingParams
from mlxrt.kernels import backend, device

TOO_LARGE = ("shape:minimax-m2@8bit", "shape:gpt-oss-120b")
LEFT_FOR_ENGINE = 3_000_000_000  # bytes: the weights of the second engine do not fit
MAX_PROMPT = 40_000
DRAWN = SamplingParams(max_tokens=24, temperature=0.7, top_k=40, seed=1, ignore_eos=True)


def fill(left: int) -> list[mx.array]:
    """Arrays that take the device but for about `left` bytes."""
    held = []
    for size in (1 << 30, 1 << 26, 1 << 22):
        while device.memory()[1] > left + size:
            held.append(mx.zeros((size,), mx.uint8))
            mx.eval(held[-1])
    return held


def ask(prompt: list[int]) -> mlxrt.Request:
    return mlxrt.Request(tokens=tuple(prompt), params=DRAWN)


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def refused(self, what: str, run) -> None:
        try:
            run()
        except mlxrt.WontFit as error:
            said = str(error)
            numbers = [word for word in said.replace(",", " ").split() if word.isdigit()]
            print(f"{what}: WontFit, {said}", flush=True)
            self.note(len(numbers) >= 2, f"{what}: the message has not both numbers")
        except mlxrt.MlxrtError as error:
            self.note(False, f"{what}: {type(error).__name__}: {error}")
        else:
            self.note(False, f"{what}: not refused")

    def answered(self, what: str, engine: mlxrt.Engine, prompt: list[int]) -> None:
        try:
            done = engine.generate(ask(prompt))
        except mlxrt.MlxrtError as error:
            self.note(False, f"{what}: {type(error).__name__}: {error}")
            return
        print(f"{what}: {len(done.tokens)} tokens", flush=True)
        self.note(len(done.tokens) == DRAWN.max_tokens, f"{what}: {len(done.tokens)} tokens")

    def note(self, right: bool, line: str) -> None:
        if not right:
            self.failed += 1
            print(f"WRONG {line}", flush=True)


def main() -> int:
    if backend() == "cpu":
        print("there is no GPU here")
        return 1
    checks = Checks()
    for name in TOO_LARGE:
        checks.refused(name, lambda name=name: mlxrt.load(name).close())
    config = EngineConfig(kv_memory="40G", prefix_cache=False, max_context=MAX_PROMPT + 100, max_running=8)
    with mlxrt.load("shape:qwen3-0.6b@4bit", config) as engine:
        long, short = make_prompts(151_936, 2, MAX_PROMPT)
        short = short[:40]
        checks.answered("first engine", engine, short)
        held = fill(LEFT_FOR_ENGINE)
        checks.refused("second engine", lambda: mlxrt.load("shape:qwen3-8b@4bit").close())
        checks.answered("after it", engine, short)
        held += fill(1_200_000_000)
        checks.refused("KV cache that cannot grow", lambda: engine.generate(ask(long)))
        checks.answered("after it", engine, short)
        held.clear()
        mx.clear_cache()
        checks.answered("with the memory back", engine, long)
    print(f"{checks.failed} wrong")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
