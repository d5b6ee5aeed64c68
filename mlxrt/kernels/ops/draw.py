"""From logits to one token a row: penalties, bias, mask, temperature, top-k, top-p, min-p and the draw.

Every token that stays weighs a whole number of 2^-40 of the best one. Sums of whole numbers are the same in any order, so
kernels split a row as they like and give the very token that the reference gives, in a batch of any size. A row's random
number is Philox' for its seed and position.

top-k keeps all tokens that equal the k-th; top-p keeps a token while those before it, better ones and equal ones with
lower ids, weigh less than top_p of all; min-p compares with the best. Then the tokens that are left are laid end to end
by their ids, each as long as its weight, and the random number points at one.
"""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..mlx_defects import cumsum
from ..registry import Case, KernelSource, op
from . import draw_rows
from .draw_rows import EVERYTHING, LISTS, DrawPlan, DrawRow, pack_rows

SLICE, BINS = 2048, 256
MAX_SLICES = 192  # what threadgroup memory has room for
ADJUST = {
    history: KernelSource(
        "draw_adjust.metal",
        ("rows", "x", *(("offset", "tokens", "recent") if history else ()), "mask"),
        ("y", "slices", "parts", *(("next",) if history else ())),
        {"HISTORY": int(history)},
        "history" if history else "",
    )
    for history in (False, True)
}
WEIGH = KernelSource("draw_weigh.metal", ("y", "slices", "rows"), ("masses", "scales"))
DRAW = KernelSource("draw.metal", ("y", "slices", "parts", "masses", "scales", "rows", "offset"), ("tokens", "status"))
LOWEST_KEY, INFINITE_KEY = 0x007FFFFF, 0xFF800000
POLYNOMIAL = (0x003DECD9, 0x025B4FA8, 0x0E27F7B7, 0x3D7C7222, 0xB171DDEE)  # of 2^-g, see `weigh`
LOW = 2**32 - 1


def draw_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for name, vocab, rows, kinds in CASES:
        mx.random.seed(vocab)
        x = mx.random.normal((len(rows), vocab)) * 2
        for kind, row in kinds:
            x[row] = ODD[kind](x[row])
        arrays: dict[str, Any] = {"x": x.astype(dtype), "rows": pack_rows(rows), "offset": mx.array([3], mx.uint32)}
        if any(row.recent for row in rows):
            arrays["tokens"] = mx.arange(5, 5 + len(rows)).astype(mx.uint32)
            arrays["recent"] = mx.random.randint(0, min(vocab, 9), (len(rows), 8)).astype(mx.uint32)
        if name.startswith("masked"):
            bits = mx.random.randint(0, 2**31 - 1, (len(rows), (vocab + 31) // 32)).astype(mx.uint32)
            arrays["mask"] = bits * mx.array(2654435761, mx.uint32)
        yield Case(f"{name}, {vocab} tokens", arrays)


def seeded(*rows: dict[str, Any]) -> list[DrawRow]:
    """Drawn rows with seeds of their own."""
    return [
        DrawRow(**{"temperature": 1.0, "seed": 2**40 * i + 77 * i + 5, "position": 3 * i, **r})
        for i, r in enumerate(rows)
    ]


ODD = {
    "even": lambda x: mx.zeros_like(x),
    "steps": lambda x: mx.round(x),
    "nan": lambda x: mx.where(mx.arange(x.size) == 17, mx.nan, x),
    "inf": lambda x: mx.where(mx.arange(x.size) == 18, mx.inf, x),
    "none": lambda x: mx.full(x.shape, -mx.inf),
    "few": lambda x: mx.where(mx.arange(x.size) % 97 == 3, x, -mx.inf),
    "two": lambda x: mx.where(mx.arange(x.size) == 9, -30.0, mx.where(mx.arange(x.size) % 3 == 1, 0.001, 0.0)),
    "peaked": lambda x: mx.where(mx.arange(x.size) == x.size - 2, 30.0, x),
}
CUTS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.95}, {"top_k": 7, "min_p": 0.1},
    {"top_p": 0.6, "min_p": 0.3}, {"top_k": 300, "top_p": 0.5, "temperature": 3.0},
]  # fmt: skip
CASES = [
    ("each kind", 2100, seeded(*CUTS), ()),
    ("masked", 5000, seeded(*CUTS), (("steps", 2), ("steps", 4))),
    ("ties", 4096, seeded(*CUTS), [(k, i) for i, k in enumerate(["steps", "even", "even", "steps", "even", "steps", "steps", "steps"])]),
    ("many of two kinds", 25_000, seeded({"top_p": 0.5}), [("two", 0)]),
    ("fewer than top_k", 2100, seeded({"top_k": 300, "top_p": 0.9}), [("few", 0)]),
    ("unusable", 100, seeded({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 200}),
     (("nan", 0), ("inf", 1), ("none", 2), ("nan", 3), ("few", 4), ("few", 5))),
    ("penalised", 2500, [
        DrawRow(repetition_penalty=1.8, prompt=[1, 2, 2499, 2047, 2048, 9000], recent=2),
        DrawRow(1.0, presence_penalty=1.5, frequency_penalty=-0.5, output=[3, 3, 4, 2060], seed=4, position=4, recent=4),
        DrawRow(0.7, 12, bias={0: 4.0, 2498: -2.0, 7: -math.inf, 2300: 3.0}, seed=9),
        DrawRow(),
    ], ()),
    ("one", 40, seeded({"top_p": 0.8, "recent": 0}), ()),
    ("one without lists", 8, [DrawRow(recent=1), *seeded({"top_k": 2})], ()),
]  # fmt: skip


@op(draw_cases)
def draw(x, rows, offset, tokens=None, recent=None, mask=None, plan: DrawPlan = EVERYTHING):
    """(tokens uint32 [R], status uint32 [R, 2], y float32 [R, V]) of logits x [R, V]; `recent` is a fourth, if given.

    `rows` [R, N] is what draw_rows.pack_rows makes, made `offset` [1] steps ago. Since then a row has got tokens: the
    newest is in `tokens` [R], those before it in `recent` [R, M], which is returned with it. `mask` uint32 [R, V / 32]
    has a bit for each token that may be chosen. `status` is the token, and 1 where no token can be chosen; y is x after
    penalties, bias and mask.
    """
    y, after = adjust(x.astype(mx.float32), rows, offset, tokens, recent, mask)
    key = sort_key(y)
    best = mx.max(key, axis=-1, keepdims=True)
    finite = (best > to_uint32(LOWEST_KEY)) & (best < to_uint32(INFINITE_KEY)) & ~mx.any(y != y, axis=-1, keepdims=True)
    chosen = mx.argmax(key, axis=-1, keepdims=True).astype(mx.uint32)
    if plan.drawn:
        sharpness = select_column(rows, draw_rows.SHARPNESS).view(mx.float32)
        chosen = mx.where(sharpness > 0, pick(y, key, best, rows, offset, sharpness, plan), chosen)
    chosen = mx.where(finite, chosen, to_uint32(0))
    status = mx.concatenate([chosen, (~finite).astype(mx.uint32)], axis=1)
    return (chosen[:, 0], status, y) if recent is None else (chosen[:, 0], status, y, after)


def select_column(rows: mx.array, i: int) -> mx.array:
    return mx.contiguous(rows[:, i : i + 1])


def to_uint32(n: int) -> mx.array:
    return mx.array(n, mx.uint32)


def to_uint64(n: int) -> mx.array:
    return mx.array(n, mx.uint64)


def adjust(y, rows, offset, tokens, recent, mask):
    """y after penalties, bias and mask; `recent` with `tokens`."""
    r, v = y.shape
    after = None
    if recent is not None:
        n = select_column(rows, draw_rows.RECENT) + offset
        after = mx.where(mx.arange(recent.shape[1]) + 1 == n, tokens[:, None], recent)
    if rows.shape[1] > LISTS or recent is not None:
        y = penalise(y, rows, after, None if recent is None else n)
    if rows.shape[1] > LISTS:
        at, ids, values = locate_biases(rows, v)
        y = y + mx.zeros((r, v + 1)).at[at, ids].add(values)[:, :v]
    if mask is not None:
        bits = mx.repeat(mask, 32, axis=1)[:, :v] >> (mx.arange(v).astype(mx.uint32) & to_uint32(31))
        y = mx.where((bits & to_uint32(1)) == 1, y, -mx.inf)
    return y, after


def penalise(y, rows, recent, n):
    """Repetition, then frequency and presence. What is no token of the vocabulary is counted in one more column."""
    r, v = y.shape
    lists, at = rows[:, LISTS:], mx.arange(r)[:, None]
    i = mx.arange(lists.shape[1]).astype(mx.uint32)
    prompts, outputs = select_column(rows, draw_rows.NUM_PROMPT), select_column(rows, draw_rows.NUM_OUTPUT)
    outside = to_uint32(v)
    ids = mx.minimum(lists, outside)
    seen = mx.zeros((r, v + 1), mx.uint32).at[at, mx.where(i < prompts, ids, outside)].add(to_uint32(1))
    own = mx.where((i >= prompts) & (i < prompts + outputs), ids, outside)
    times = mx.zeros((r, v + 1), mx.uint32).at[at, own].add(to_uint32(1))
    if recent is not None:
        newest = mx.where(mx.arange(recent.shape[1]) < n, mx.minimum(recent, outside), outside)
        times = times.at[at, newest].add(to_uint32(1))
    seen, times = seen[:, :v], times[:, :v]
    above, below, presence, frequency = (
        select_column(rows, i).view(mx.float32)
        for i in (draw_rows.REPEATED_ABOVE, draw_rows.REPEATED_BELOW, draw_rows.PRESENCE, draw_rows.FREQUENCY)
    )
    repeated = mx.where((seen > 0) | (times > 0), y * mx.where(y < 0, below, above), y)
    return mx.where(times > 0, repeated - frequency * times.astype(mx.float32) - presence, repeated)


def locate_biases(rows, v):
    lists = rows[:, LISTS:]
    i = mx.arange(lists.shape[1]).astype(mx.uint32)
    begin = select_column(rows, draw_rows.NUM_PROMPT) + select_column(rows, draw_rows.NUM_OUTPUT)
    n = select_column(rows, draw_rows.NUM_BIAS)
    here = (i >= begin) & (i < begin + n)
    values = mx.take_along_axis(lists, mx.minimum(i + n, to_uint32(lists.shape[1] - 1)), axis=1).view(mx.float32)
    ids = mx.where(here, mx.minimum(lists, to_uint32(v)), to_uint32(v))
    return mx.arange(rows.shape[0])[:, None], ids, mx.where(here, values, 0.0)


def sort_key(y: mx.array) -> mx.array:
    """uint32 in the order of the floats."""
    bits = mx.where(y == 0, 0.0, y).view(mx.uint32)
    return mx.where(bits >> 31 != 0, ~bits, bits | to_uint32(0x80000000))


def key_logit(key: mx.array) -> mx.array:
    return mx.where(key >> 31 != 0, key & to_uint32(0x7FFFFFFF), ~key).view(mx.float32)


def weigh(gap: mx.array) -> mx.array:
    """2^(40 - gap) as uint64, by whole numbers alone: the same on every device."""
    fixed = mx.where(gap < 41, gap * 2.0**24, 0.0).astype(mx.uint64)
    g = (fixed & to_uint64(0xFFFFFF)) << 8
    p = to_uint64(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = to_uint64(coefficient) - (p * g >> 32)
    mantissa = to_uint64(2**31) - (p * g >> 33)
    return mx.where(gap < 41, (mantissa << 9) >> (fixed >> 24), to_uint64(0))


def multiply_high64(a: mx.array, b: mx.array) -> mx.array:
    low = to_uint64(LOW)
    middle = (a >> 32) * (b & low) + ((a & low) * (b & low) >> 32)
    carry = (a & low) * (b >> 32) + (middle & low) >> 32
    return (a >> 32) * (b >> 32) + (middle >> 32) + carry


def random_bits(rows, offset) -> mx.array:
    """Philox 4x32-10: uint64 [R, 1] for each row's seed and position."""
    low, high = (select_column(rows, i).astype(mx.uint64) for i in (draw_rows.SEED_LOW, draw_rows.SEED_HIGH))
    a = (select_column(rows, draw_rows.POSITION) + offset).astype(mx.uint64)
    b = c = d = mx.zeros_like(a)
    for i in range(10):
        first, second = to_uint64(0xD2511F53) * a, to_uint64(0xCD9E8D57) * c
        keys = [
            (key + to_uint64(i * step & LOW)) & to_uint64(LOW) for key, step in ((low, 0x9E3779B9), (high, 0xBB67AE85))
        ]
        a, b, c, d = (
            (second >> 32) ^ b ^ keys[0],
            second & to_uint64(LOW),
            (first >> 32) ^ d ^ keys[1],
            first & to_uint64(LOW),
        )
    return b << 32 | a


def pick(y, key, best, rows, offset, sharpness, plan):
    """The token [R, 1] that each row's random number points at."""
    upto = cumsum(weigh_kept(y, key, best, rows, sharpness, plan), axis=-1)
    target = multiply_high64(upto[:, -1:], random_bits(rows, offset))
    return mx.minimum(mx.sum((upto <= target).astype(mx.uint32), axis=-1, keepdims=True), to_uint32(y.shape[1] - 1))


def weigh_kept(y, key, best, rows, sharpness, plan) -> mx.array:
    """What each token weighs, uint64 [R, V]; 0 for those that top-k, top-p and min-p drop."""
    peak = key_logit(best)
    gap = (peak - y) * sharpness
    weight = weigh(gap)
    stays = (key > to_uint32(LOWEST_KEY)) & (gap <= select_column(rows, draw_rows.MAX_GAP).view(mx.float32))
    if plan.top_k or plan.sorts:
        stays = stays & keep_best(key, weight, rows, lambda key: weigh((peak - key_logit(key)) * sharpness), plan)
    return mx.where(stays, weight, to_uint64(0))


def keep_best(key, weight, rows, weight_of, plan) -> mx.array:
    """Which tokens top-k and top-p keep, [R, V]."""
    v = key.shape[1]
    m = v if plan.sorts else plan.top_k
    best = mx.sort(mx.topk(key, m, axis=-1) if m < v else key, axis=-1)  # no more than the last k are needed
    k = mx.minimum(select_column(rows, draw_rows.TOP_K), to_uint32(m))
    kth = mx.take_along_axis(best, mx.where(k > 0, m - k.astype(mx.int32), 0), axis=-1)
    cut = mx.where(k > 0, kth, to_uint32(0))
    top_p = select_column(rows, draw_rows.TOP_P).astype(mx.uint64)
    total = mx.sum(mx.where(key >= cut, weight, to_uint64(0)), axis=-1, keepdims=True)
    limit = mx.maximum((total >> 32) * top_p + ((total & to_uint64(LOW)) * top_p >> 32), to_uint64(1))
    down = mx.contiguous(best[:, ::-1])
    mass = mx.where(down >= cut, weight_of(down), to_uint64(0))
    inside = (cumsum(mass, axis=-1) - mass < limit) & (down >= cut)
    last = mx.maximum(mx.sum(inside.astype(mx.int32), axis=-1, keepdims=True), 1) - 1
    nucleus = mx.take_along_axis(down, last, axis=-1)
    above = mx.sum(mx.where(key > nucleus, weight, to_uint64(0)), axis=-1, keepdims=True)
    each = mx.maximum(weight_of(nucleus), to_uint64(1))
    ties = (limit - above + each - to_uint64(1)) // each
    tied = key == nucleus
    stays = (key > nucleus) | (tied & (cumsum(tied.astype(mx.uint64), axis=-1) <= ties))
    return mx.where(top_p > 0, stays, key >= cut)


def unsupported(x, recent=None, tokens=None, **_) -> str | None:
    if x.shape[1] > MAX_SLICES * SLICE:
        return f"a vocabulary of {x.shape[1]} tokens, more than {MAX_SLICES * SLICE}"
    return None


@draw.kernel(*ADJUST.values(), WEIGH, DRAW, unsupported=unsupported)
def launch(gpu, x, rows, offset, tokens=None, recent=None, mask=None, plan: DrawPlan = EVERYTHING):
    (r, v), n = x.shape, rows.shape[1]
    slices = -(-v // SLICE)
    shapes = [((r, v), mx.float32), ((r, slices, 4), mx.uint32), ((r, slices * 8), mx.uint32)]
    history = [] if recent is None else [offset, tokens, recent]
    constants: dict[str, Any] = {"N": n, "V": v, "S": slices}
    if history:
        shapes.append((recent.shape, mx.uint32))
    more = {"M": recent.shape[1]} if history else {}
    y, peaks, parts, *after = gpu(
        ADJUST[bool(history)], [rows, x, *history, mask], (slices, r, 1), 256, shapes,
        T=x.dtype, MASKED=mask is not None, **more, **constants,
    )  # fmt: skip
    shapes = [((r, slices, BINS, 2), mx.uint32), ((r,), mx.float32)]
    masses, scales = gpu(WEIGH, [y, peaks, rows], (slices, r, 1), BINS, shapes, **constants)
    shapes = [((r,), mx.uint32), ((r, 2), mx.uint32)]
    given = [y, peaks, parts, masses, scales, rows, offset]
    return (*gpu(DRAW, given, r, 1024, shapes, **constants), y, *after)


def cpu_unsupported(x, **_) -> str | None:
    return None if x.dtype == mx.float32 else f"logits of {x.dtype}"


@draw.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: iter(()))
def launch_cpu(cpu, x, rows, offset, tokens=None, recent=None, mask=None, plan: DrawPlan = EVERYTHING):
    return cpu.draw(x, rows, offset, tokens, recent, mask)
