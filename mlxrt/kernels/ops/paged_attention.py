"""One token a row against its row's keys and values: paged blocks, the tail of the running batch, and the new token.

One launch does what stands between the QKV product and the output product: norms of the heads, rope, the tail with the
new token, and attention over an exact window with sinks and soft cap. Long contexts are split over threadgroups and
joined by a second launch. The texts are in attention_text.py.
"""

from typing import Any

import mlx.core as mx

from ..dispatch import Gpu
from ..registry import InlineSource, op
from .attention_cases import attention_cases
from .attention_text import JOIN, source
from .qkv_layout import Pages, QKVLayout
from .qmv import bits_of

WIDTHS = (64, 128, 256, 512)  # of heads
WIDEST = 256  # of which matrix units hold queries and results in a lane's registers
# Threadgroups that fill an H200 once (132 multiprocessors), and twice: at 32,768 tokens (32 heads of 128) 40.0 us with 128
# of them and 43.2 with 256 for bfloat16, but 35.0 and 33.6 for 8 bit, 32.1 and 29.7 for 4 bit.
ONCE, TWICE = 128, 256
# A few short rows are met faster by lanes alone: 9.5 us against 11.2 on an H200 (16 heads of 128, 512 tokens).
ALONE, FEW = 1024, 8  # tokens up to which, rows from which they are not few
SOURCES = {(new, tiled): source(new=new, tiled=tiled, coded=False) for new in (True, False) for tiled in (True, False)}


@op(attention_cases)
def paged_attention(qkv, heads, pages, scale, window=None, softcap=None, sinks=None):
    """(out [R, queries * dim], tail with the new token): each row's token sees its row's positions up to its own."""
    base, start, used = pages.where.T
    at = start + used
    q, *new = heads.prepare(qkv, at)
    tail, rows = pages.tail, qkv.shape[0]
    if new:
        here = (mx.arange(tail.shape[2]) == used[:, None])[:, None, :, None]
        tail = mx.where(here, mx.concatenate(new, axis=1)[:, :, None], tail)
    past = pages.pool[pages.table].transpose(0, 2, 1, 3, 4).flatten(2, 3)  # [R, 2 keys, W * size, dim]
    known = base[:, None] + mx.arange(past.shape[2])
    known = mx.where(known < start[:, None], known, mx.array(1 << 30))
    known = mx.concatenate([known, start[:, None] + mx.arange(tail.shape[2])], axis=1)
    k, v = mx.split(mx.concatenate([past, tail], axis=2).astype(mx.float32), 2, axis=1)
    seen = known <= at[:, None]
    if window is not None:
        seen = seen & (known > at[:, None] - window)
    scores = q.reshape(rows, heads.keys, -1, heads.dim).astype(mx.float32) * scale @ k.swapaxes(-1, -2)
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    scores = mx.where(seen[:, None, None], scores, -mx.inf)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, heads.keys, -1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, sink], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : k.shape[2]]
    return (weights @ v).reshape(rows, -1).astype(qkv.dtype), tail


def unsupported(qkv, heads, pages, **rest) -> str | None:
    if heads.dim not in WIDTHS:
        return f"heads of {heads.dim}: {', '.join(map(str, WIDTHS))} are built"
    if qkv.dtype != pages.pool.dtype:
        return f"keys are kept as {pages.pool.dtype}, activations are {qkv.dtype}"
    if heads.queries % heads.keys:
        return f"{heads.queries} queries for {heads.keys} keys"
    return None


@paged_attention.kernel(*SOURCES.values(), JOIN, unsupported=unsupported)
def launch(gpu, qkv, heads, pages, scale, window=None, softcap=None, sinks=None):
    form = seen(scale, window, softcap, sinks) | pages.form() | {"HEADS": qkv.shape[1] // heads.dim}
    out, *new = run(gpu, SOURCES, [qkv], qkv, qkv.shape[1], heads, pages, sinks, form)
    return out, new[0] if new else pages.tail


def run(
    gpu: Gpu,
    sources: dict[tuple[bool, bool], InlineSource],
    begins: list[mx.array | None],
    x: mx.array,
    width: int,
    heads: QKVLayout,
    pages: Pages,
    sinks: mx.array | None,
    form: dict[str, Any],
    *,
    entering: bool = False,
) -> list[mx.array]:
    """Attention's output, then the tail with the new token, if there is one.

    `begins`: what the text's heads come from, for rows like x's and `width` numbers of a QKV product; `form`: what else
    it must know, as constants; `entering`: it makes the heads itself. Pages of codes have words as their numbers.
    """
    rows, h, kv, dim = x.shape[0], heads.queries, heads.keys, heads.dim
    new, tail = width > h * dim, pages.tail
    size, room = pages.pool.shape[2], tail.shape[2]
    tokens = pages.table.shape[1] * size
    tiled = fits(x.dtype, dim, form) and (tokens > ALONE or rows >= FEW)
    together, simdgroups, splits, resident = shape_of(rows, h, kv, dim, tokens, tiled, form["CODED"], entering)
    out = ((rows, h * dim), x.dtype) if splits == 1 else ((rows, h, splits, dim + 2), mx.float32)
    kept = (pages.pool, tail, pages.table, pages.where)
    found, *made = gpu(
        sources[new, tiled],
        [*begins, *kept, heads.inv_freq, heads.q_norm, heads.k_norm, sinks],
        (rows * h // together, splits, 1),
        32 * simdgroups,
        [out, (tail.shape, tail.dtype)] if new else [out],
        T=x.dtype,
        OUT=out[1],
        H=h,
        KV=kv,
        D=dim,
        HG=together,
        SG=simdgroups,
        U=2,
        SPLITS=splits,
        RESIDENT=resident,
        NEW=new,
        QN=heads.q_norm is not None,
        KN=heads.k_norm is not None,
        VN=heads.v_norm,
        TIED=heads.tied,
        EPS=bits_of(heads.eps),
        TURN=0 if heads.inv_freq is None else heads.inv_freq.shape[0],
        MAGNITUDE=bits_of(heads.magnitude),
        S=size,
        TAIL=room,
        W=pages.table.shape[1],
        **form,
    )
    return [join(gpu, found, x, heads, sinks), *made]


def fits(dtype: mx.Dtype, dim: int, form: dict[str, Any]) -> bool:
    """Whether matrix units can do it: in half precision, where what a lane takes of a group of codes is whole words."""
    return dtype != mx.float32 and dim <= WIDEST and min(form["KB"] * 2, form["VB"]) * form["GROUP"] >= 256


def seen(scale: float, window: int | None, softcap: float | None, sinks: mx.array | None) -> dict[str, Any]:
    """Which keys count and how, as constants of the kernel."""
    cap = 0 if softcap is None else bits_of(softcap)
    return {"SCALE": bits_of(scale), "WINDOW": window or 0, "CAP": cap, "SINKS": sinks is not None}


def join(gpu: Gpu, parts: mx.array, x: mx.array, heads: QKVLayout, sinks: mx.array | None) -> mx.array:
    """Attention's output [R, queries * dim], from the parts of the keys where they were split: parts are of rank 4."""
    if parts.ndim == 2:
        return parts
    (rows, h, splits, _), dim = parts.shape, heads.dim
    sizes = {"T": x.dtype, "H": h, "D": dim, "SPLITS": splits, "SIZE": 128, "SINKS": sinks is not None}
    return gpu(JOIN, [parts, sinks], rows * h, 128, [((rows, h * dim), x.dtype)], **sizes)[0]


def shape_of(
    rows: int, h: int, kv: int, dim: int, tokens: int, tiled: bool, coded: bool, entering: bool = False
) -> tuple[int, int, int, int]:
    """(query heads a threadgroup takes together, its simdgroups, parts of the keys, threadgroups for a multiprocessor).

    Heads that share a key head read it once if they go together; they may where enough threadgroups are left. Simdgroups
    are as many as registers (of 65,536 on CUDA, where a lane takes up to 170 for heads of 128, 250 for 256) and 20 KB of
    threadgroup memory for their results allow. Two threadgroups of 8 hide each other's waiting, if there are so many.
    """
    for together in (8, 4, 2, 1) if dim <= 256 else (4, 2, 1):
        busy = rows * h // together
        splits = parts_of(tokens, busy, TWICE if tiled and coded else ONCE)
        if together == 1 or (h // kv % together == 0 and busy * splits >= ONCE):
            break
    resident = 2 if tiled and dim <= 128 and busy * splits >= TWICE else 1
    if tiled:
        most = 12 if dim <= 128 and resident == 1 else 8
    else:
        most = 16 if together == 1 and dim <= (256 if entering else 128) and not coded else 8
    simdgroups = max(1, min(most, 5120 // (together * dim)))
    return together, simdgroups, splits, resident


def parts_of(tokens: int, busy: int, wanted: int) -> int:
    """Parts of 512 keys at least, until there are as many threadgroups as wanted; up to 1,024 keys one launch is better
    than two."""
    splits = 1
    while tokens > 1024 and tokens > 512 * splits and busy * splits < wanted and splits < 64:
        splits *= 2
    return splits
