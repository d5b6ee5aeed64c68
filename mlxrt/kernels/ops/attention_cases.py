"""Calls that prove attention over pages: ragged rows, windows, sinks, soft caps, splits, every width of a head."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..registry import Case
from .qkv_layout import Pages, QKVLayout


def paged_case(
    name: str, pages: Any, dtype: mx.Dtype, rows: int, heads: tuple[int, int, int], extra: dict[str, Any]
) -> Case:
    """A call for `rows` tokens over these pages; `heads` are queries, keys and how wide they are."""
    h, kv, dim = heads
    norms = [1 + 0.2 * mx.random.normal((dim,)).astype(dtype) for _ in range(2)] if extra.get("norms") else [None] * 2
    turning = extra.get("turning")
    inv_freq = None if turning is None else 10000.0 ** -(mx.arange(turning) / turning)
    more = (bool(extra.get("v_norm")), 1e-6, inv_freq, extra.get("magnitude", 1.0), bool(extra.get("tied")))
    width = h if extra.get("read") else h + kv if extra.get("tied") else h + 2 * kv
    arrays = {"qkv": mx.random.normal((rows, width * dim)).astype(dtype)}
    if extra.get("sinks"):
        arrays["sinks"] = mx.random.normal((h,)).astype(dtype)
    options = {"heads": QKVLayout(h, kv, dim, norms[0], norms[1], *more), "pages": pages, "scale": dim**-0.5}
    options |= {k: v for k, v in extra.items() if k in ("window", "softcap")}
    return Case(name, arrays, options, large=bool(extra.get("large")))


def attention_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        # R, queries, keys, dim, size, blocks a row, start, used, options
        (1, 4, 2, 64, 8, 3, [19], 3, {"norms": True, "turning": 32}),
        (3, 2, 2, 128, 32, 2, [0, 40, 33], 0, {"turning": 64, "window": 20, "sinks": True}),
        (2, 8, 1, 256, 16, 4, [50, 7], 15, {"turning": 32, "v_norm": True, "softcap": 5.0, "tied": True}),
        (2, 4, 1, 512, 8, 2, [9, 3], 5, {"read": True}),
        # Split over threadgroups; a short row has fewer keys than there are parts.
        (2, 2, 1, 64, 32, 80, [2500, 5], 6, {"turning": 16, "magnitude": 1.3, "sinks": True}),
        # Many rows: matrix units, in half precision. In the last two heads of a key go together.
        (8, 4, 2, 64, 8, 3, [19, 0, 1, 7, 8, 15, 16, 23], 3, {"norms": True, "turning": 32}),
        (9, 2, 2, 128, 32, 2, [0, 40, 33, 63, 17], 0, {"turning": 64, "window": 20, "sinks": True}),
        (8, 2, 1, 256, 16, 4, [50, 7, 33], 15, {"turning": 32, "v_norm": True, "softcap": 5.0, "tied": True}),
        (8, 1, 1, 64, 8, 2, [9, 3], 5, {"read": True}),
        (64, 8, 2, 64, 8, 1, [3, 6], 1, {"turning": 32}),
        (8, 1, 1, 64, 32, 14, [440, 5, 201], 2, {}),  # simdgroups take keys several times
        (1, 2, 1, 64, 32, 40, [1270], 9, {"window": 4}),  # a window within the tail, in parts
        (1, 2, 1, 64, 32, 9, [280], 15, {"turning": 32}),  # simdgroups take keys twice, the last ones at the tail's end
        (1, 32, 8, 128, 32, 1024, [32000], 9, {"norms": True, "turning": 64, "large": True}),
    ]
    for rows, h, kv, dim, size, blocks, start, used, extra in shapes:
        mx.random.seed(dim + rows)
        start = [start[i % len(start)] for i in range(rows)]
        many = rows * blocks + 1
        table = mx.random.permutation(mx.arange(1, many)).reshape(rows, blocks)
        base = [s // size * size - (blocks - 1) * size if s >= blocks * size else 0 for s in start]
        pages = Pages(
            mx.random.normal((many, 2 * kv, size, dim)).astype(dtype),
            mx.random.normal((rows, 2 * kv, 16, dim)).astype(dtype),
            table.astype(mx.int32),
            mx.array([[b, s, used] for b, s in zip(base, start)]),
        )
        name = f"{h}/{kv} heads of {dim}, {rows} rows of {start[:3]}"
        yield paged_case(name, pages, dtype, rows, (h, kv, dim), extra)
