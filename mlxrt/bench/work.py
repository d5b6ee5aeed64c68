"""What one token costs a model: bytes to read, sums to do. From the outline alone: nothing is loaded or allocated.

It gives the roofs: no engine decodes faster than memory brings the bytes, none prefills faster than matmuls run.
"""

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..cache.memory import ExternalKV, Shared
from ..engine.load import DTYPES, is_packed, open_checkpoint, outline, unpacked_fits
from ..errors import BadRequest
from ..kernels import device
from ..models import CausalLM, find
from ..weights.formats.gguf.tensors import PACKED
from ..weights.random_models import Shape
from ..weights.randomise import packs
from ..weights.source.resolve import Located

USED_EXPERTS = ("num_experts_per_tok", "top_k_experts", "experts_per_token")


@dataclass(frozen=True)
class Work:
    """Of one token of one sequence, whatever else runs in the batch."""

    resident: int  # bytes of weights in memory
    read: int  # bytes of weights one token needs: of experts only those that are used
    multiplied: int  # weights it is multiplied with
    kept: tuple[tuple[float, int], ...]  # per layer with keys and values: bytes per token held, window (0: all)
    heads: int  # layers x query heads x head size of attention: 4 sums each per token held

    def bytes_at(self, context: int) -> float:
        """Read by a decode step after so many tokens."""
        return self.read + sum(size * (min(context, window) if window else context) for size, window in self.kept)

    def flops_at(self, context: float) -> float:
        return 2 * self.multiplied + 4 * self.heads * context

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def work_of(located: Located, dtype: str | None = None) -> Work:
    """Of the model as an engine here would hold it."""
    if located.shape is not None:
        return of_shape(located.shape, compute_dtype(dtype, mx.bfloat16))
    checkpoint = open_checkpoint(located)
    on_cpu = device.kind() == "cpu"
    chosen = compute_dtype(dtype, mx.float16)
    model = outline(checkpoint.config)
    model.set_dtype(chosen)
    if not is_packed(checkpoint) or (on_cpu and unpacked_fits(checkpoint, chosen)):
        return measured(model, located_config(located), {})
    rename = find(checkpoint.config).rename
    stored = {}
    for name, info in checkpoint.sizes().items():
        plain = info.dtype not in ("U32", "U8", *PACKED)
        stored[rename(name)] = prod(info.shape) * chosen.size if plain else info.nbytes
    return measured(model, located_config(located), stored)


def located_config(located: Located) -> dict[str, Any]:
    return located.shape.config if located.shape is not None else open_checkpoint(located).config


def compute_dtype(asked: str | None, on_gpu: mx.Dtype) -> mx.Dtype:
    if asked is not None and asked not in DTYPES:
        raise BadRequest(f"dtype must be {', '.join(DTYPES)}, not {asked!r}")
    return DTYPES[asked] if asked else (mx.float32 if device.kind() == "cpu" else on_gpu)


def of_shape(shape: Shape, dtype: mx.Dtype) -> Work:
    model, packed = outline(shape.config), outline(shape.config)
    for m in (model, packed):
        m.set_dtype(dtype)
    if shape.bits is not None:  # lazy: every matrix gets its packed shape and nothing is computed
        chosen = lambda _, module: packs(module, shape.group_size)  # noqa: E731
        nn.quantize(packed, shape.group_size, shape.bits, mode=shape.mode, class_predicate=chosen)
    return measured(model, shape.config, {name: array.nbytes for name, array in flat(packed).items()})


def flat(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def measured(model: CausalLM, raw: dict[str, Any], stored: dict[str, int]) -> Work:
    """`stored`: bytes of tensors by name; empty where the outline's own are those in memory."""
    arrays = flat(model)
    stored = stored or {name: array.nbytes for name, array in arrays.items()}
    used = used_experts(raw)
    tied = not any(name.startswith("lm_head") for name in arrays)
    read, multiplied = 0.0, 0.0
    for name, array in arrays.items():
        if array.ndim < 2 or ("embed_tokens" in name and not (tied and name.endswith("embed_tokens.weight"))):
            continue  # norms are nothing beside matrices; of an embedding one row is read
        path = name.removesuffix(".weight")
        share = min(1.0, used / array.shape[0]) if array.ndim == 3 else 1.0
        read += share * sum(stored.get(f"{path}.{part}", 0) for part in ("weight", "scales", "biases"))
        multiplied += share * array.size
    return Work(sum(stored.values()), int(read), int(multiplied), kept(model), attention_size(raw))


def used_experts(raw: dict[str, Any]) -> int:
    text = raw.get("text_config")
    for place in (raw, text if isinstance(text, dict) else {}):
        for key in USED_EXPERTS:
            if isinstance(place.get(key), int):
                return place[key]
    return 1


def attention_size(raw: dict[str, Any]) -> int:
    text = raw.get("text_config")
    place = raw | text if isinstance(text, dict) else raw
    heads, layers = place.get("num_attention_heads") or 0, place.get("num_hidden_layers") or 0
    head_dim = place.get("head_dim") or (place.get("hidden_size") or 0) // max(heads, 1)
    return layers * heads * head_dim


def kept(model: CausalLM) -> tuple[tuple[float, int], ...]:
    found = []
    for spec in model.cache_specs():
        if isinstance(spec, Shared) or (spec.grows is False if isinstance(spec, ExternalKV) else not spec.paged):
            continue
        window: Any = vars(spec).get("window")  # of windows and rings alone
        found.append((spec.nbytes() / spec.size, window or 0))
    return tuple(found)
