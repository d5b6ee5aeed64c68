"""mlx-lm's own loops (`generate_step`, `BatchGenerator`: tokens are not detokenized), greedy, default settings.

Setting: {folder} or {shape, dtype}: mlxrt makes the shape's random weights and puts them into mlx-lm's module.
Questions as in `mlxrt.py`: generate {prompt, max_tokens, fresh, config: {kv_bits}}, batch {requests}, serve.
Importing mlxrt puts its BLAS under MLX here too; MLXRT_BLAS=off leaves mlx-lm as it is shipped.
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import mlxrt
from mlxrt import _openblas
from mlxrt.bench.backends.serve import Arrivals, Clock, Served, serve
from mlxrt.bench.machine import library_name

RENAMES = (("block_sparse_moe", "mlp"), ("experts.switch_glu", "experts"), ("switch_mlp", "experts"))


class MlxLmBackend(Served):
    """Keeps a prompt cache between questions and trims it to the prefix the next prompt shares."""

    def __init__(self, setting: dict[str, Any]):
        began = time.perf_counter()
        mx.reset_peak_memory()
        if "shape" in setting:
            self.model = build_shape(setting["shape"], setting.get("dtype"))
        else:
            from mlx_lm.utils import load_model

            self.model, _ = load_model(Path(setting["folder"]))
        self.load_s, self.load_peak = time.perf_counter() - began, mx.get_peak_memory()
        self.caches: dict[int | None, tuple[list, list[int]]] = {}  # kv_bits -> caches, the tokens they hold

    def info(self) -> dict[str, Any]:
        import mlx_lm

        times = {"load_s": self.load_s, "load_peak": self.load_peak}
        return {
            "engine": f"mlx-lm {mlx_lm.__version__}",
            "said": [],
            **times,
            "blas": library_name(_openblas.running()),
        }

    def reply(self, question: dict[str, Any]) -> Any:
        try:
            return super().reply(question)
        except ValueError as error:  # how mlx-lm refuses an option
            raise mlxrt.BadRequest(str(error)) from None

    def cache(self, prompt: list[int], bits: int | None, fresh: bool) -> tuple[list, int]:
        """A prompt cache and how much of the prompt it holds: all but one token at most."""
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

        caches, held = self.caches.pop(bits, ([], []))
        if caches and not fresh:
            shared = next((i for i, (a, b) in enumerate(zip(held, prompt)) if a != b), min(len(held), len(prompt)))
            shared = min(shared, len(prompt) - 1)
            if shared == len(held):
                return caches, shared
            if can_trim_prompt_cache(caches) and trim_prompt_cache(caches, len(held) - shared) == len(held) - shared:
                return caches, shared
        return make_prompt_cache(self.model), 0

    def generate(
        self, prompt: list[int], max_tokens: int, fresh: bool = True, config: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        from mlx_lm.generate import generate_step

        bits = (config or {}).get("kv_bits")
        mx.reset_peak_memory()
        tokens, clock = [], Clock()
        cache, cached = self.cache(prompt, bits, fresh)
        quantized = {"kv_bits": bits, "quantized_kv_start": 0} if bits else {}
        rest = mx.array(prompt[cached:])
        for token, _ in generate_step(rest, self.model, max_tokens=max_tokens, prompt_cache=cache, **quantized):
            clock.mark()
            tokens.append(int(token))
        mx.synchronize()  # it computes one token more than asked for
        self.caches[bits] = (cache, [*prompt, *tokens])
        kv = sum(c.nbytes for c in cache)
        return {"tokens": tokens, "cached": cached, "peak": mx.get_peak_memory(), "kv": kv} | clock.to_dict()

    def restart(self, history: list[int], prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Save the prompt cache of the history, drop it, load it from its file and go on."""
        from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

        self.generate(history, max_tokens)
        cache, held = self.caches.pop(None)
        trim_prompt_cache(cache, len(held) - len(history))
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "cache.safetensors")
            save_prompt_cache(file, cache)
            del cache
            mx.clear_cache()
            start, used = time.perf_counter(), time.process_time()
            self.caches[None] = (load_prompt_cache(file), list(history))
            load_wall, load_cpu = time.perf_counter() - start, time.process_time() - used
            reply = self.generate(prompt, max_tokens, fresh=False)
        return reply | {"at": [load_wall + at for at in reply["at"]], "used": [load_cpu + at for at in reply["used"]]}

    def batch(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        from mlx_lm.generate import BatchGenerator

        mx.reset_peak_memory()
        generator = BatchGenerator(self.model, stop_tokens=[])
        reply = Arrivals(requests, partial(submit, generator), partial(step, generator)).run()
        generator.close()
        mx.synchronize()
        return reply | {"peak": mx.get_peak_memory()}

    def serve(self, requests: list[dict[str, Any]], after: int) -> dict[str, Any]:
        """As in `mlxrt.py`; positions and stalls are counted where the model is called, padding included."""
        from mlx_lm.generate import BatchGenerator

        model: Any = CountingModel(self.model)
        generator = BatchGenerator(model, stop_tokens=[])
        stall, prompted, held = 0, dict[int, int](), dict[str, int]()

        def observe(row: int) -> None:
            nonlocal stall
            if not requests[row]["late"]:
                stall = max(stall, model.prompted - prompted.get(row, model.prompted))
                prompted[row] = model.prompted
            if not held and load.all_running:
                held.update(held=generator.prompt_cache_nbytes, held_tokens=load.token_count)

        load = Arrivals(requests, partial(submit, generator), partial(step, generator), observe, after)
        reply = load.run()
        generator.close()
        return reply | held | {"positions": model.positions, "stall": stall}


def submit(generator: Any, request: dict[str, Any]) -> int:
    [uid] = generator.insert([request["prompt"]], [request["max_tokens"]])
    return uid


def step(generator: Any, ids: list[int]) -> Iterator[tuple[int, int, bool]]:
    """Run a step and yield its tokens."""
    _, events = generator.next()
    for event in events:
        yield event.uid, int(event.token), event.finish_reason is not None


class CountingModel:
    """A model that counts the positions it computes."""

    def __init__(self, model: Any):
        self._model, self.positions, self.prompted = model, 0, 0

    def __call__(self, tokens: Any, *args: Any, **options: Any) -> Any:
        self.positions += tokens.size
        self.prompted += tokens.size if tokens.shape[1] > 1 else 0
        return self._model(tokens, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def build_shape(name: str, dtype: str | None) -> Any:
    """mlx-lm's module of a published shape with mlxrt's random weights."""
    from mlx_lm.utils import _get_classes

    from mlxrt.engine.load_plan import compute_dtype
    from mlxrt.engine.weight_size import build_skeleton
    from mlxrt.weights.random_models import Shape, random_weights

    shape = Shape.parse(name)
    source = build_skeleton(shape.config)
    chosen = compute_dtype(dtype, mx.bfloat16)
    random_weights(source, shape.bits, chosen, mode=shape.mode, group_size=shape.group_size)
    weights: dict[str, Any] = dict(tree_flatten(source.parameters()))  # type: ignore[arg-type]
    module, arguments = _get_classes(shape.config)
    model = module(arguments.from_dict(shape.config))
    if shape.bits is not None:
        packed = lambda path, part: hasattr(part, "to_quantized") and f"{our_name(path)}.scales" in weights  # noqa: E731
        nn.quantize(model, shape.group_size, shape.bits, mode=shape.mode, class_predicate=packed)
    expected: dict[str, Any] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    if "lm_head.weight" in expected and "lm_head.weight" not in weights:  # tied to the embedding
        model.sanitize({})
        expected.pop("lm_head.weight")
    names = {path: our_name(path) for path in expected}
    mismatched = {path for path, name in names.items() if name not in weights} | weights.keys() - set(names.values())
    weights_by_path = {
        path: add_channel(weights[names[path]], expected[path].shape) for path in expected.keys() - mismatched
    }
    mismatched |= {path for path, array in weights_by_path.items() if array.shape != expected[path].shape}
    if mismatched:
        few = ", ".join(sorted(mismatched)[:3])
        raise mlxrt.UnsupportedModel(f"its module for {name} has other tensors than mlxrt's ({few})")
    model.load_weights(list(weights_by_path.items()))
    mx.eval(model.parameters())
    return model


def add_channel(array: Any, shape: tuple[int, ...]) -> Any:
    """mlx-lm's convolutions have a last axis of one channel."""
    return array.reshape(shape) if shape == (*array.shape, 1) else array


def our_name(name: str) -> str:
    """mlxrt's name of a tensor in mlx-lm."""
    for theirs, ours in RENAMES:
        name = name.replace(theirs, ours)
    return name.removeprefix("language_model.")


if __name__ == "__main__":
    serve(MlxLmBackend)
