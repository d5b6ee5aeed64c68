"""mlxrt with default settings, or those of a question; all of them over one set of weights.

Setting: {model, config}. Questions by `do`:
generate {prompt, max_tokens, fresh, config} -> {tokens, at and used: wall and CPU seconds from the call to each token,
cached, peak, kv};
batch {requests: [{prompt, max_tokens, after}], config, fresh} -> {rows: [{tokens, at}], seconds};
serve {requests: [{prompt, max_tokens, late}], after}: see `serve`;
gap {prompt, pair} -> how far the second token's logit lies below the first's after the prompt;
encode {text}, decode {tokens}, losses {windows, first, config}, logit_error {prompt, config}: see the methods.
"""

import logging
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx

import mlxrt
from mlxrt import Request, SamplingParams, _openblas
from mlxrt.bench.backends.serve import Arrivals, Clock, Served, serve
from mlxrt.bench.machine import library_name
from mlxrt.engine.load import build_model, open_checkpoint
from mlxrt.errors import NoTokenizer
from mlxrt.kernels import device
from mlxrt.text import Tokenizer
from mlxrt.weights.random_models import is_quantizable
from mlxrt.weights.source.resolve import resolve


def record_log(lines: list[str]) -> None:
    """Append every line that mlxrt logs from now on."""
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mlxrt")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


class MlxrtBackend(Served):
    def __init__(self, setting: dict[str, Any]):
        self.setting, self.lines = setting, list[str]()
        record_log(self.lines)
        began = time.perf_counter()
        config = mlxrt.EngineConfig(**setting.get("config", {}))
        mx.reset_peak_memory()
        self.first = mlxrt.load(setting["model"], config)
        self.load_s = time.perf_counter() - began
        self.load_peak = mx.get_peak_memory()
        try:
            self.tokenizer: Tokenizer | None = self.first.tokenizer
        except NoTokenizer:
            self.tokenizer = None
        self.engines = {"{}": self.first}

    def info(self) -> dict[str, Any]:
        engine, info = self.first, mx.device_info()
        return {
            "engine": f"mlxrt {mlxrt.__version__}",
            "said": self.lines,
            "load_s": self.load_s,
            "load_peak": self.load_peak,
            "device": device.backend(),
            "device_name": str(info.get("device_name", "")),
            "blas": library_name(_openblas.running()) if device.backend() == "cpu" else None,
            "dtype": str(engine.model.dtype).removeprefix("mlx.core."),
            "vocab": engine.model.config.vocab_size,
            "context": engine.context,
            "tokenizer": self.tokenizer is not None,
        }

    def log_lines(self) -> list[str]:
        """Everything logged since the start, also kernels that fell back to plain MLX."""
        return list(dict.fromkeys(self.lines))

    def engine(self, config: dict[str, Any]) -> mlxrt.Engine:
        """One per configuration, all over the same model."""
        key = repr(dict(sorted(config.items())))
        if key not in self.engines:
            first, rest = self.first, dict(config)
            bits = rest.pop("weight_bits", None)
            model = first.model if bits is None else self.quantize_weights(bits)
            engine_config = mlxrt.EngineConfig(**rest)
            self.engines[key] = mlxrt.Engine(model, engine_config, self.tokenizer, first.source)
        return self.engines[key]

    def quantize_weights(self, bits: int) -> Any:
        """The model with every matrix quantized to so many bits in groups of 64 and dequantized."""
        model = build_model(open_checkpoint(resolve(self.setting["model"])), self.first.config)
        for module in model.modules():
            if "weight" in module and "scales" not in module and is_quantizable(module, 64):
                weight = module.weight
                module.weight = mx.dequantize(*mx.quantize(weight, 64, bits), 64, bits).astype(weight.dtype)
                mx.eval(module.weight)
        return model

    def prepare(self, config: dict[str, Any] | None, fresh: bool) -> mlxrt.Engine:
        engine = self.engine(config or {})
        if fresh and engine.core.prefix_cache is not None:
            engine.core.prefix_cache.clear()
        mx.reset_peak_memory()
        return engine

    def generate(
        self, prompt: list[int], max_tokens: int, fresh: bool = True, config: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        engine = self.prepare(config, fresh)
        reply = time_tokens(engine, make_request(prompt, max_tokens), Clock())
        mx.synchronize()
        if fresh and reply["cached"]:
            raise mlxrt.MlxrtError(f"{reply['cached']} prompt tokens came from a cache that should be empty")
        return reply | {"peak": mx.get_peak_memory(), "kv": engine.stats().kv_bytes}

    def batch(
        self, requests: list[dict[str, Any]], config: dict[str, Any] | None = None, fresh: bool = True
    ) -> dict[str, Any]:
        """Serve requests that arrive `after` so many seconds; times count from each one's arrival."""
        engine = self.prepare(config, fresh)
        reply = Arrivals(requests, partial(submit, engine), partial(step, engine)).run()
        mx.synchronize()
        return reply | {"peak": mx.get_peak_memory()}

    def serve(self, requests: list[dict[str, Any]], after: int) -> dict[str, Any]:
        """Serve `late` requests that arrive once each of the others has `after` tokens.

        -> {rows: [{tokens, at}], seconds, positions: tokens computed, stall: most prompt tokens computed between two
        tokens of a stream, stall_bound, held: KV bytes while all run, held_tokens: the tokens in them, preemptions}
        """
        engine = self.prepare({}, fresh=True)
        computed, engine.core.scheduler.longest_stall = engine.core.positions, 0
        held: dict[str, int] = {}

        def measure_held(row: int) -> None:
            if not held and load.all_running:
                held.update(held=engine.stats().kv_live, held_tokens=load.token_count)

        load = Arrivals(requests, partial(submit, engine), partial(step, engine), measure_held, after)
        reply, stats = load.run(), engine.stats()
        counts = {"positions": engine.core.positions - computed, "preemptions": stats.preemptions}
        return reply | held | counts | {"stall": stats.longest_stall, "stall_bound": stats.stall_bound}

    def restart(self, history: list[int], prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """A prompt whose prefix another engine has left in the disk cache; opening and reading it count."""
        first = self.first
        with tempfile.TemporaryDirectory() as folder:
            config = mlxrt.EngineConfig(disk_cache=folder)
            start = partial(mlxrt.Engine, first.model, config, self.tokenizer, first.source)
            with start() as before:
                before.generate(make_request(history, max_tokens))
            clock = Clock()
            with start() as engine:
                return time_tokens(engine, make_request(prompt, max_tokens), clock)

    def gap(self, prompt: list[int], pair: list[int]) -> float:
        logits = self.first.score(prompt)[-1]
        return item(logits[pair[0]] - logits[pair[1]])

    def encode(self, text: str) -> list[int]:
        return self.first.tokenizer.encode(text, special=False)

    def decode(self, tokens: list[int]) -> str:
        return self.first.tokenizer.decode(tokens)

    def losses(self, windows: list[list[int]], first: int, config: dict[str, Any] | None = None) -> dict[str, Any]:
        """Negative log probability of every token from `first` on, and the likeliest token at each position."""
        engine = self.engine(config or {})
        losses: list[float] = []
        best: list[int] = []
        for tokens in windows:
            logits = engine.score(tokens)[first - 1 : -1]
            chosen = mx.take_along_axis(logits, mx.array(tokens[first:])[:, None], axis=-1)[:, 0]
            window_losses: Any = (mx.logsumexp(logits, axis=-1) - chosen).tolist()
            best_tokens: Any = mx.argmax(logits, axis=-1).tolist()
            losses += window_losses
            best += best_tokens
        return {"losses": losses, "best": best}

    def logit_error(self, prompt: list[int], config: dict[str, Any]) -> dict[str, float]:
        """Distance of a configuration's logits to those of a full KV cache, over all positions of a prompt."""
        plain, other = (mx.log(mx.softmax(self.engine(c).score(prompt), axis=-1) + 1e-30) for c in ({}, config))
        spread = mx.exp(plain) * (plain - other)
        return {
            "kl": item(spread.sum(axis=-1).mean()),
            "most": item(mx.abs(plain - other).max(axis=-1).mean()),
            "same_best": item((plain.argmax(-1) == other.argmax(-1)).mean()),
        }


def time_tokens(engine: mlxrt.Engine, request: Request, clock: Clock) -> dict[str, Any]:
    tokens, cached = [], 0
    with engine.stream(request) as stream:
        for event in stream:
            if event.token is not None:  # a token may give several events
                clock.mark()
                tokens.append(event.token)
            if event.timings:
                cached = event.timings.cached_tokens
    return {"tokens": tokens, "cached": cached} | clock.to_dict()


def submit(engine: mlxrt.Engine, request: dict[str, Any]) -> int:
    return engine.submit(make_request(request["prompt"], request["max_tokens"]))


def step(engine: mlxrt.Engine, ids: list[int]) -> Iterator[tuple[int, int, bool]]:
    """Run a step and yield its tokens."""
    engine.step()
    for id in ids:
        events = engine.take(id)
        for event in events:
            if event.error is not None:
                raise event.error
        tokens = [event.token for event in events if event.token is not None]  # a token may give several events
        ended = any(event.finish_reason is not None for event in events)
        yield from ((id, token, ended and i == len(tokens)) for i, token in enumerate(tokens, 1))


def make_request(prompt: list[int], max_tokens: int) -> Request:
    return Request(tokens=tuple(prompt), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def item(array: Any) -> float:
    return array.item()


if __name__ == "__main__":
    serve(MlxrtBackend)
