"""mlxrt with its default settings, or those a question asks for; all of them over one set of weights.

Setting: {model, config}. Questions by `do`:
generate {prompt, max_tokens, fresh, config} -> {tokens, at and used: seconds from the call to each token by the wall
clock and of the processor, cached, peak, kv};
batch {requests: [{prompt, max_tokens, after}], config} -> {rows: [{tokens, at}], began};
gap {prompt, pair} -> how far the second token's logit lies below the first's after the prompt;
encode {text}, decode {tokens}, losses {windows, first, config}, logits error {prompt, config}: see the methods.
"""

import logging
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlxrt
from mlxrt import Event, Request, SamplingParams
from mlxrt import _openblas as blas
from mlxrt.bench.machine import library
from mlxrt.bench.sides.serving import Clock, serve


def record_log(lines: list[str]) -> None:
    """Append every line that mlxrt logs from now on."""
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mlxrt")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


class Ours:
    def __init__(self, setting: dict[str, Any]):
        import mlx.core as mx

        self.setting, self.lines = setting, list[str]()
        record_log(self.lines)
        began = time.perf_counter()
        config = mlxrt.EngineConfig(**setting.get("config", {}))
        mx.reset_peak_memory()
        self.first = mlxrt.load(setting["model"], config)
        self.load_s = time.perf_counter() - began
        self.load_peak = mx.get_peak_memory()
        self.engines = {"{}": self.first}

    def told(self) -> dict[str, Any]:
        import mlx.core as mx

        from mlxrt.kernels import device

        engine, info = self.first, mx.device_info()
        tokenizer = engine._tokenizer
        return {
            "engine": f"mlxrt {mlxrt.__version__}",
            "said": self.lines,
            "load_s": self.load_s,
            "load_peak": self.load_peak,
            "device": device.kind(),
            "device_name": str(info.get("device_name", "")),
            "blas": library(blas.running()) if device.kind() == "cpu" else None,
            "dtype": str(engine.model.dtype).removeprefix("mlx.core."),
            "vocab": engine.model.config.vocab_size,
            "context": engine.context,
            "tokenizer": tokenizer is not None,
        }

    def said(self) -> list[str]:
        """Everything worth knowing since the start: also what fell back to plain MLX while it ran."""
        return list(dict.fromkeys(self.lines))

    def reply(self, question: dict[str, Any]) -> Any:
        return getattr(self, question.pop("do"))(**question)

    def engine(self, config: dict[str, Any]) -> mlxrt.Engine:
        """One per configuration, all over the same model."""
        key = repr(dict(sorted(config.items())))
        if key not in self.engines:
            first, rest = self.first, dict(config)
            bits = rest.pop("weight_bits", None)
            model = first.model if bits is None else self.rounded(bits)
            made = mlxrt.EngineConfig(**rest)
            self.engines[key] = mlxrt.Engine(model, made, first._tokenizer, first.source)
        return self.engines[key]

    def rounded(self, bits: int) -> Any:
        """The model with every matrix rounded to so many bits in groups of 64 and back."""
        import mlx.core as mx

        from mlxrt.engine.load import filled, open_checkpoint
        from mlxrt.weights.randomise import packs
        from mlxrt.weights.source.resolve import locate

        model = filled(open_checkpoint(locate(self.setting["model"])), self.first.config)
        for module in model.modules():
            if "weight" in module and "scales" not in module and packs(module, 64):
                weight = module.weight
                module.weight = mx.dequantize(*mx.quantize(weight, 64, bits), 64, bits).astype(weight.dtype)
                mx.eval(module.weight)
        return model

    def events(self, engine: mlxrt.Engine, request: Request) -> Iterator[Event]:
        with engine.stream(request) as stream:
            yield from stream

    def generate(
        self, prompt: list[int], max_tokens: int, fresh: bool = True, config: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        import mlx.core as mx

        engine = self.engine(config or {})
        if fresh and engine.store is not None:
            engine.store.clear()
        mx.reset_peak_memory()
        tokens, clock, cached = [], Clock(), 0
        for event in self.events(engine, ask(prompt, max_tokens)):
            clock.mark()
            tokens.append(event.token)
            if event.timings:
                cached = event.timings.cached_tokens
        mx.synchronize()
        if fresh and cached:
            raise mlxrt.MlxrtError(f"{cached} prompt tokens came from a cache that was empty: nothing was measured")
        told = {"tokens": tokens, "cached": cached, "peak": mx.get_peak_memory(), "kv": held(engine)}
        return told | clock.to_dict()

    def batch(self, requests: list[dict[str, Any]], config: dict[str, Any] | None = None) -> dict[str, Any]:
        """Requests as they arrive, `after` so many seconds; times are from each one's own arrival."""
        import mlx.core as mx

        engine = self.engine(config or {})
        if engine.store is not None:
            engine.store.clear()
        mx.reset_peak_memory()
        rows: list[dict[str, list]] = [{"tokens": [], "at": []} for _ in requests]
        waiting = sorted(range(len(requests)), key=lambda i: requests[i]["after"])
        running: dict[int, int] = {}  # the engine's number -> row
        start, used = time.perf_counter(), time.process_time()
        while waiting or running:
            now = time.perf_counter() - start
            while waiting and requests[waiting[0]]["after"] <= now:
                row = waiting.pop(0)
                running[engine.submit(ask(requests[row]["prompt"], requests[row]["max_tokens"]))] = row
            if not engine.step() and waiting:
                time.sleep(min(0.001, max(0.0, requests[waiting[0]]["after"] - now)))
            now = time.perf_counter() - start
            for id, row in list(running.items()):
                for event in engine.take(id):
                    rows[row]["tokens"].append(event.token)
                    rows[row]["at"].append(now - requests[row]["after"])
                    if event.finish_reason:
                        del running[id]
        mx.synchronize()
        took = {"seconds": time.perf_counter() - start, "seconds_used": time.process_time() - used}
        return {"rows": rows, **took, "peak": mx.get_peak_memory()}

    def restart(self, history: list[int], prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """A prompt whose beginning another engine has left on disk. Opening the folder and reading it count."""
        first = self.first
        tokens, cached = [], 0
        with tempfile.TemporaryDirectory() as folder:
            config = mlxrt.EngineConfig(disk_cache=folder)
            made = partial(mlxrt.Engine, first.model, config, first._tokenizer, first.source)
            with made() as before:
                before.generate(ask(history, max_tokens))
            clock = Clock()
            with made() as engine:
                for event in self.events(engine, ask(prompt, max_tokens)):
                    clock.mark()
                    tokens.append(event.token)
                    cached = event.timings.cached_tokens if event.timings else cached
        return {"tokens": tokens, "cached": cached} | clock.to_dict()

    def gap(self, prompt: list[int], pair: list[int]) -> float:
        logits = self.first.score(prompt)[-1]
        return number(logits[pair[0]] - logits[pair[1]])

    def encode(self, text: str) -> list[int]:
        return self.first.tokenizer.encode(text, special=False)

    def decode(self, tokens: list[int]) -> str:
        return self.first.tokenizer.decode(tokens)

    def losses(self, windows: list[list[int]], first: int, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """Minus the log probability of every token from `first` on, and the likeliest token in each place."""
        import mlx.core as mx

        engine = self.engine(config or {})
        losses: list[float] = []
        best: list[int] = []
        for tokens in windows:
            logits = engine.score(tokens)[first - 1 : -1]
            chosen = mx.take_along_axis(logits, mx.array(tokens[first:])[:, None], axis=-1)[:, 0]
            lost: Any = (mx.logsumexp(logits, axis=-1) - chosen).tolist()
            likeliest: Any = mx.argmax(logits, axis=-1).tolist()
            losses += lost
            best += likeliest
        return {"losses": losses, "best": best}

    def logit_error(self, prompt: list[int], config: dict[str, Any]) -> dict[str, float]:
        """How far a configuration's logits lie from those of full keys and values, over all places of a prompt."""
        import mlx.core as mx

        plain, other = (mx.log(mx.softmax(self.engine(c).score(prompt), axis=-1) + 1e-30) for c in ({}, config))
        spread = mx.exp(plain) * (plain - other)
        return {
            "kl": number(spread.sum(axis=-1).mean()),
            "most": number(mx.abs(plain - other).max(axis=-1).mean()),
            "same_best": number((plain.argmax(-1) == other.argmax(-1)).mean()),
        }


def ask(prompt: list[int], max_tokens: int) -> Request:
    return Request(tokens=tuple(prompt), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def number(array: Any) -> float:
    return array.item()


def held(engine: mlxrt.Engine) -> int:
    """Bytes of keys and values the last request and its prefix left in places somebody holds."""
    return engine.stats().kv_bytes


if __name__ == "__main__":
    serve(Ours)
