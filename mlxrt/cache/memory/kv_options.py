"""KV options of the user (`kv`, `max_kv_size`), applied to the cache specs of the model.

They change the arithmetic, so each is logged as a warning.
"""

import logging
from dataclasses import replace

import mlx.core as mx

from ...errors import BadRequest
from ...kernels import KV_GROUPS, QuantizedKV
from .layer_spec import LayerSpec, Shared
from .paged import PagedKV, RotatingKV

log = logging.getLogger("mlxrt")

# name -> bits of keys and values; None: unquantized
KV: dict[str, tuple[int, int] | None] = {
    "full": None, "paged": None, "q8": (8, 8), "q6": (6, 6), "q4": (4, 4), "q3": (3, 3), "q2": (2, 2), "k8v4": (8, 4),
}  # fmt: skip
KEEP = 4  # first tokens that stay visible under max_kv_size: many heads use them as attention sinks

Specs = list[LayerSpec | Shared]


def apply_kv_options(specs: Specs, kv: str, max_kv_size: int | None, dtype: mx.Dtype, quiet: bool = False) -> Specs:
    """The specs with the options in them. `quiet`: only to know whether they apply, and what they take."""
    warn = log.debug if quiet else log.warning
    if kv not in KV:
        raise BadRequest(f"kv must be one of {', '.join(KV)}, not {kv!r}")
    if bits := KV[kv]:
        specs = [quantize(s, *bits, dtype) if isinstance(s, PagedKV) else s for s in specs]
        if not any(isinstance(s, PagedKV) for s in specs):
            raise BadRequest(f"kv {kv} does not apply: mlxrt keeps no keys and values for this model")
        better = "; keys need their bits more than values do: k8v4 differs far less" if bits[0] < 6 else ""
        warn(f"kv {kv}: keys in {bits[0]} bits, values in {bits[1]}; answers may differ from kv full{better}")
    if max_kv_size is not None:
        specs = limit_window(specs, max_kv_size)
        warn(
            f"max_kv_size {max_kv_size}: full-attention layers see the first {KEEP} tokens and the last "
            f"{max_kv_size - KEEP}; answers to longer texts differ from the model's own"
        )
    return specs


def quantize(spec: PagedKV, key: int, value: int, dtype: mx.Dtype) -> PagedKV:
    group = next((g for g in sorted(KV_GROUPS, reverse=True) if g <= 64 and spec.dim % g == 0), KV_GROUPS[0])
    return replace(spec, codec=QuantizedKV(key, value, group, dtype))


def limit_window(specs: Specs, size: int) -> Specs:
    if size <= 2 * KEEP:
        raise BadRequest(f"max_kv_size must be above {2 * KEEP} tokens, not {size}")
    if not any(type(s) is PagedKV for s in specs):
        raise BadRequest("max_kv_size does not apply: the model has no full-attention layers")
    limits = {"window": size - KEEP, "keep": KEEP}
    return [RotatingKV(s.heads, s.dim, s.codec, s.size, **limits) if type(s) is PagedKV else s for s in specs]
