"""Gated DeltaNet prefill: all between a layer's two projections for every token of a packed batch of rows.

Three launches however many rows there are: what the delta rule reads of each token, the rule itself, token by token with
the state in registers, and the gated norm. The states that a step keeps, after each row's last token and at its checkpoints,
come out of the same launches.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..registry import Case, KernelSource, op
from .gated_delta import UNIT_EPS, delta_rule, gated_delta_layer, num_key_heads, split_projection
from .gated_delta import unsupported as unsupported_step
from .qmv import bits_of

INPUT_NAMES = ("projected", "spans", "tokens", "conv_state", "conv_weight", "a_log", "dt_bias")
PREPARED = ("qk", "dots", "v", "gates")
INPUTS = KernelSource("gated_delta_inputs.metal", INPUT_NAMES, (*PREPARED, "conv_out"))
SCAN = KernelSource("gated_delta_scan.metal", (*PREPARED, "spans", "tokens", "state"), ("o", "state_out"))
NORM = KernelSource("gated_delta_norm.metal", ("projected", "o", "norm"), ("y",))

# A column of the state is shared out over LANES lanes, each of which has COLS columns: 32 registers for 128 rows. Four simdgroups
# have a strip of 32 columns, so one text of a model with 32 heads of 128 x 128 has 128 threadgroups: one for each of an H200's cores.
LANES, COLS, SIMDGROUPS = 8, 2, 4
TOKENS = 8  # in threadgroup memory at a time; registers for as many more
MAX_SIMDGROUPS = 8  # of the launches before and after


@dataclass(frozen=True)
class PackedRows:
    """Rows of tokens, end to end, and which of their states are kept. Arrays of int32."""

    spans: mx.array  # [R, 2] first token of a row and one past its last
    tokens: mx.array  # [N, 2] the row of a token and the slot of the state after it; -1: it is not kept
    slots: int  # states that are kept: those after the rows come first

    @classmethod
    def pack(cls, rows: Sequence[tuple[int, Sequence[int]]]) -> "PackedRows":
        """Rows are (length, lengths at which a checkpoint is): slots of the checkpoints follow in their order."""
        lengths = np.array([length for length, _ in rows])
        ends = np.cumsum(lengths)
        kept = [*ends, *(end - length + n for end, (length, inner) in zip(ends, rows) for n in inner)]
        tokens = np.full((ends[-1], 2), -1, np.int32)
        tokens[:, 0] = np.repeat(np.arange(len(rows)), lengths)
        tokens[np.array(kept) - 1, 1] = np.arange(len(kept))
        spans = np.stack([ends - lengths, ends], axis=1).astype(np.int32)
        return cls(mx.array(spans), mx.array(tokens), len(kept))


def delta_scan(state, q, k, v, g, beta):
    """The rule for many tokens, one after another; shapes as in `gated_delta_layer`."""
    ys = []
    for t in range(q.shape[-2]):
        state, y = delta_rule(state, *(x[..., t : t + 1, :] for x in (q, k, v, g, beta)))
        ys.append(y)
    return state, mx.concatenate(ys, axis=-2)


def prefill_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        # rows (length, checkpoints), key heads, value heads of each, key dim, value dim, convolution
        ([(5, ())], 1, 1, 32, 32, 4),
        ([(1, ()), (3, (2,)), (19, (8, 16))], 2, 2, 64, 32, 4),
        ([(9, ()), (1, ()), (2, (1,)), (24, (16, 23))], 1, 4, 32, 64, 2),
        ([(18, (8,))], 1, 1, 128, 128, 4),
        ([(2, ()), (11, ())], 2, 3, 96, 64, 3),
        ([(10, (1, 9))], 1, 2, 256, 256, 8),
        ([(300, (64, 128, 192, 256)), (1, ()), (100, (36,))], 16, 2, 128, 128, 4),  # Qwen3.5 9B
    ]
    for rows, keys, each, key_dim, value_dim, width in shapes:
        mx.random.seed(key_dim + value_dim)
        heads, n = keys * each, sum(length for length, _ in rows)
        channels = 2 * keys * key_dim + heads * value_dim
        a = mx.linspace(-6, 6, n * heads).reshape(n, heads)  # both ways to a logarithm
        projected = [mx.random.normal((n, channels + heads * (value_dim + 1))), a]
        halves = {
            "projected": mx.concatenate(projected, axis=-1),
            "conv_state": mx.random.normal((len(rows), width - 1, channels)),
            "conv_weight": mx.random.normal((channels, width)),
            "norm": mx.random.normal((value_dim,)),
        }
        arrays = {name: x.astype(dtype) for name, x in halves.items()}
        arrays["state"] = mx.random.normal((len(rows), heads, key_dim, value_dim))
        arrays["a_log"], arrays["dt_bias"] = mx.random.uniform(-3, 0, (heads,)), mx.random.normal((heads,))
        lengths = " + ".join(str(length) for length, _ in rows)
        name = f"{lengths} tokens, {keys} x {each} heads of {key_dim} x {value_dim}, width {width}"
        yield Case(name, arrays, {"rows": PackedRows.pack(rows), "eps": 1e-6}, large=heads > 8)


@op(prefill_cases)
def gated_delta_prefill(projected, rows, conv_state, state, **weights):
    """projected [N, C + Hv Dv + 2 Hv] (q, k, v; z; b; a), conv_state [R, width - 1, C], state [R, Hv, Dk, Dv] ->
    y [N, Hv Dv], and the states that `rows` keeps, as those given."""
    xs = split_projection(projected, state)
    slots: Any = rows.tokens[:, 1].tolist()
    spans: Any = rows.spans.tolist()
    ys: list[mx.array] = []
    kept: dict[int, tuple[mx.array, mx.array]] = {}
    for r, (start, end) in enumerate(spans):
        before, row_state = conv_state[r : r + 1], state[r : r + 1]
        for n in (i + 1 for i in range(start, end) if slots[i] >= 0):
            piece = {name: x[None, start:n] for name, x in xs.items()}
            y, before, row_state = gated_delta_layer(delta_scan, **piece, conv_state=before, state=row_state, **weights)
            ys.append(y[0])
            kept[slots[n - 1]], start = (before, row_state), n
    states = zip(*(kept[slot] for slot in range(rows.slots)))
    return mx.concatenate(ys), *(mx.concatenate(list(x)) for x in states)


def unsupported(projected, conv_state, state, conv_weight, **rest) -> str | None:
    return unsupported_step(projected, conv_state, state, conv_weight)


@gated_delta_prefill.kernel(INPUTS, SCAN, NORM, unsupported=unsupported)
def launch(gpu, projected, rows, conv_state, state, conv_weight, a_log, dt_bias, norm, eps):
    (n, width), (num_rows, heads, key_dim, value_dim) = projected.shape, state.shape
    values = heads * value_dim
    key_heads = num_key_heads(conv_state, state)
    dtype, channels = projected.dtype, width - values - 2 * heads
    shape = {"T": dtype, "K_HEADS": key_heads, "V_HEADS": heads, "K_DIM": key_dim, "V_DIM": value_dim}
    simdgroups = math.gcd(key_heads + heads, MAX_SIMDGROUPS)
    *prepared, conv_out = gpu(
        INPUTS,
        [projected, rows.spans, rows.tokens, conv_state, conv_weight, a_log, dt_bias],
        (n, (key_heads + heads) // simdgroups, 1),
        simdgroups * 32,
        [
            ((n, key_heads, 2, key_dim), mx.float32),
            ((n, key_heads), mx.float32),
            ((n, values), dtype),
            ((n, heads, 2), mx.float32),
            ((rows.slots, conv_state.shape[1], channels), dtype),
        ],
        CONV=conv_weight.shape[1],
        SIMDGROUPS=simdgroups,
        UNIT_EPS=bits_of(UNIT_EPS),
        **shape,
    )
    strip = SIMDGROUPS * 32 // LANES * COLS
    o, state_out = gpu(
        SCAN,
        [*prepared, rows.spans, rows.tokens, state],
        (heads * value_dim // strip, num_rows, 1),
        SIMDGROUPS * 32,
        [((n, values), dtype), ((rows.slots, *state.shape[1:]), mx.float32)],
        LANES=LANES,
        COLS=COLS,
        SIMDGROUPS=SIMDGROUPS,
        TOKENS=TOKENS,
        **shape,
    )
    simdgroups = math.gcd(heads, MAX_SIMDGROUPS)
    [y] = gpu(
        NORM,
        [projected, o, norm],
        (n, heads // simdgroups, 1),
        simdgroups * 32,
        [((n, values), dtype)],
        SIMDGROUPS=simdgroups,
        EPS=bits_of(eps),
        **shape,
    )
    return y, conv_out, state_out
