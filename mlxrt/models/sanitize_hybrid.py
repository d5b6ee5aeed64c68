"""The ways checkpoints store gated delta nets and norms less one, as gated_delta.py and qwen3_next.py have them.

Works on names and shapes. Reordering whole rows leaves packed matrices packed.
"""

import re

import mlx.core as mx

from ..errors import BadCheckpoint, quote
from ..kernels.dtypes import FLOATS
from ..kernels.ops.k_quants import TENSOR_NAMES

Arrays = dict[str, mx.array]

LESS_ONE = re.compile(r"(.*\.(input|post_attention)_layernorm|.*\.self_attn\.[qk]_norm|model\.norm)\.weight")
# The norms around layers: all near 1 or all near 0.
AROUND = re.compile(r".*\.(input|post_attention)_layernorm\.weight")
ROWS = "|".join(("weight", "scales", "biases", *TENSOR_NAMES))
GROUPED = re.compile(rf"(.*\.linear_attn\.)in_proj_(qkvz|ba)\.({ROWS})")
CONV = re.compile(r".*\.linear_attn\.conv1d\.weight")


def sanitize_hybrid(config, arrays: Arrays) -> Arrays:
    """Convolutions as [channels, width], norms as the gain itself, projections apart. Takes `arrays` apart."""
    add = 0.0 if norms_include_one(config, arrays) else 1.0
    sanitized: Arrays = {}
    for name in list(arrays):
        array = arrays.pop(name)
        if found := GROUPED.fullmatch(name):
            made = {f"{found[1]}in_proj_{to}.{found[3]}": a for to, a in ungroup(config, name, found[2], array)}
        elif CONV.fullmatch(name):
            made = {name: squeeze_conv(array)}
        elif LESS_ONE.fullmatch(name) and array.dtype in FLOATS:  # any other is left for the comparison to name
            made = {name: array.astype(mx.float32) + add}
        else:
            made = {name: array}
        if twice := made.keys() & sanitized.keys():
            raise BadCheckpoint(f"the checkpoint holds {quote(min(twice))} twice, in two layouts; keep one")
        sanitized |= made
    return sanitized


def is_mlx_conv(conv: mx.array) -> bool:
    """MLX converts [channels, 1, width] to [channels, width, 1]."""
    return conv.ndim == 3 and conv.shape[2] == 1 and conv.shape[1] > 1


def squeeze_conv(conv: mx.array) -> mx.array:
    """Without the axis of length 1; what has none is left for the comparison of shapes to name."""
    if is_mlx_conv(conv):
        return conv.squeeze(2)
    return conv.squeeze(1) if conv.ndim == 3 and conv.shape[1] == 1 else conv


def norms_include_one(config, arrays: Arrays) -> bool:
    """The original never has the 1 in its norms. Of those who convert it for MLX some add it: a stamp or the average
    tells. JANG also leaves convolutions as they were, so for its bundles they say nothing."""
    if config.jang_norms_pre_shifted:
        return True
    convs = [array for name, array in arrays.items() if CONV.fullmatch(name)]
    norms = [array for name, array in arrays.items() if AROUND.fullmatch(name) and array.dtype in FLOATS]
    if not norms or not (config.by_jang or any(map(is_mlx_conv, convs))):
        return False
    gains = mx.concatenate([norm.astype(mx.float32).flatten() for norm in norms])
    return bool((gains.mean() > 0.5).item())


def ungroup(config, name: str, what: str, array: mx.array) -> list[tuple[str, mx.array]]:
    """Rows that lie key head by key head, part by part instead: all q, all k, all v, then the gate; all b, all a."""
    c, heads = config, config.linear_num_key_heads
    each = c.linear_num_value_heads // heads
    values = each * c.linear_value_head_dim
    widths = [c.linear_key_head_dim] * 2 + [values] * 2 if what == "qkvz" else [each] * 2
    if array.ndim != 2 or array.shape[0] != heads * sum(widths):
        raise BadCheckpoint(f"{quote(name)}: expected {heads * sum(widths)} rows, found shape {list(array.shape)}")
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    parts = mx.split(array.reshape(heads, sum(widths), array.shape[1]), ends, axis=1)
    *first, last = (part.flatten(0, 1) for part in parts)
    return [(what[:-1], mx.concatenate(first)), (what[-1], last)]
