"""mlx-lm's own loops (`generate_step`, `BatchGenerator`: no text is made of the tokens), greedy, default settings.

Setting: {folder} or {shape, dtype}: the shape's random weights are drawn by mlxrt and put into mlx-lm's module.
Questions as in `ours.py`: generate {prompt, max_tokens, fresh, config: {kv_bits}}, batch {requests}.
Importing mlxrt puts its BLAS under MLX here too; MLXRT_BLAS=off leaves mlx-lm as it is shipped.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import mlxrt
from mlxrt import _openblas as blas
from mlxrt.bench.machine import library
from mlxrt.bench.sides.serving import Clock, serve

RENAMED = (("block_sparse_moe", "mlp"), ("experts.switch_glu", "experts"), ("switch_mlp", "experts"))


class MlxLm:
    """A prompt cache is kept from question to question and cut back to what the next prompt shares with it."""

    def __init__(self, setting: dict[str, Any]):
        import mlx.core as mx

        began = time.perf_counter()
        mx.reset_peak_memory()
        if "shape" in setting:
            self.model = shaped(setting["shape"], setting.get("dtype"))
        else:
            from mlx_lm.utils import load_model

            self.model, _ = load_model(Path(setting["folder"]))
        self.load_s, self.load_peak = time.perf_counter() - began, mx.get_peak_memory()
        self.caches: dict[int | None, tuple[list, list[int]]] = {}  # kv_bits -> caches, the tokens they hold

    def told(self) -> dict[str, Any]:
        import mlx_lm

        engine = f"mlx-lm {mlx_lm.__version__}"
        return {
            "engine": engine,
            "said": [],
            "load_s": self.load_s,
            "load_peak": self.load_peak,
            "blas": library(blas.running()),
        }

    def reply(self, question: dict[str, Any]) -> Any:
        try:
            return getattr(self, question.pop("do"))(**question)
        except ValueError as error:  # how mlx-lm says that an option does not suit a model
            raise mlxrt.BadRequest(str(error)) from None

    def cache(self, prompt: list[int], bits: int | None, fresh: bool) -> tuple[list, int]:
        """A prompt cache and how much of the prompt it holds: never all, one token has to be run."""
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

        caches, held = self.caches.pop(bits, ([], []))
        if caches and not fresh:
            same = next((i for i, (a, b) in enumerate(zip(held, prompt)) if a != b), min(len(held), len(prompt)))
            same = min(same, len(prompt) - 1)
            if same == len(held):
                return caches, same
            if can_trim_prompt_cache(caches) and trim_prompt_cache(caches, len(held) - same) == len(held) - same:
                return caches, same
        return make_prompt_cache(self.model), 0

    def generate(
        self, prompt: list[int], max_tokens: int, fresh: bool = True, config: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        bits = (config or {}).get("kv_bits")
        mx.reset_peak_memory()
        tokens, clock = [], Clock()
        cache, cached = self.cache(prompt, bits, fresh)
        quantised = {"kv_bits": bits, "quantized_kv_start": 0} if bits else {}
        rest = mx.array(prompt[cached:])
        for token, _ in generate_step(rest, self.model, max_tokens=max_tokens, prompt_cache=cache, **quantised):
            clock.mark()
            tokens.append(int(token))
        mx.synchronize()  # it computes one token more than it was asked for
        self.caches[bits] = (cache, [*prompt, *tokens])
        kv = sum(c.nbytes for c in cache)
        return {"tokens": tokens, "cached": cached, "peak": mx.get_peak_memory(), "kv": kv} | clock.to_dict()

    def restart(self, history: list[int], prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """The prompt cache of the history saved, forgotten, loaded from its file and gone on with."""
        import mlx.core as mx
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
            opened, cost = time.perf_counter() - start, time.process_time() - used
            reply = self.generate(prompt, max_tokens, fresh=False)
        return reply | {"at": [opened + at for at in reply["at"]], "used": [cost + at for at in reply["used"]]}

    def batch(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator

        mx.reset_peak_memory()
        made = BatchGenerator(self.model, stop_tokens=[])
        rows: list[dict[str, list]] = [{"tokens": [], "at": []} for _ in requests]
        waiting = sorted(range(len(requests)), key=lambda i: requests[i]["after"])
        running: dict[int, int] = {}
        start, used = time.perf_counter(), time.process_time()
        while waiting or running:
            now = time.perf_counter() - start
            while waiting and requests[waiting[0]]["after"] <= now:
                row = waiting.pop(0)
                [uid] = made.insert([requests[row]["prompt"]], [requests[row]["max_tokens"]])
                running[uid] = row
            if not running:
                time.sleep(min(0.001, max(0.0, requests[waiting[0]]["after"] - now)))
                continue
            _, events = made.next()
            now = time.perf_counter() - start
            for event in events:
                row = running[event.uid]
                rows[row]["tokens"].append(int(event.token))
                rows[row]["at"].append(now - requests[row]["after"])
                if event.finish_reason:
                    del running[event.uid]
        took = {"seconds": time.perf_counter() - start, "seconds_used": time.process_time() - used}
        made.close()
        mx.synchronize()
        return {"rows": rows, **took, "peak": mx.get_peak_memory()}


def shaped(name: str, dtype: str | None) -> Any:
    """mlx-lm's module of a published shape, with the numbers mlxrt draws for it."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    from mlxrt.bench.work import compute_dtype
    from mlxrt.engine.load import outline
    from mlxrt.weights.random_models import Shape, random_weights

    shape = Shape.parse(name)
    source = outline(shape.config)
    chosen = compute_dtype(dtype, mx.bfloat16)
    random_weights(source, shape.bits, chosen, mode=shape.mode, group_size=shape.group_size)
    weights: dict[str, Any] = dict(tree_flatten(source.parameters()))  # type: ignore[arg-type]
    module, arguments = _get_classes(shape.config)
    model = module(arguments.from_dict(shape.config))
    if shape.bits is not None:
        packed = lambda path, part: hasattr(part, "to_quantized") and f"{plain(path)}.scales" in weights  # noqa: E731
        nn.quantize(model, shape.group_size, shape.bits, mode=shape.mode, class_predicate=packed)
    wanted: dict[str, Any] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    if "lm_head.weight" in wanted and "lm_head.weight" not in weights:  # a head that is the embedding
        model.sanitize({})
        wanted.pop("lm_head.weight")
    odd = {path for path in wanted if plain(path) not in weights} | (weights.keys() - set(map(plain, wanted)))
    placed = {path: reshaped(weights[plain(path)], wanted[path].shape) for path in wanted.keys() - odd}
    odd |= {path for path, array in placed.items() if array.shape != wanted[path].shape}
    if odd:
        few = ", ".join(sorted(odd)[:3])
        raise mlxrt.UnsupportedModel(f"its module for {name} has other tensors than mlxrt's ({few})")
    model.load_weights(list(placed.items()))
    mx.eval(model.parameters())
    return model


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Convolutions end in one channel there, and in none here."""
    return array.reshape(shape) if shape == (*array.shape, 1) else array


def plain(name: str) -> str:
    """mlx-lm's name of a tensor as mlxrt calls it."""
    for theirs, ours in RENAMED:
        name = name.replace(theirs, ours)
    return name.removeprefix("language_model.")


if __name__ == "__main__":
    serve(MlxLm)
