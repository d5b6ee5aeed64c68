"""The ways checkpoints store experts, as the one way `moe.Experts` has them: X.experts.{gate,up,down}_proj.*, stacked.

Works on names and shapes. Arrays stay lazy: a stack is made once, when it is evaluated.
"""

import re
from collections import defaultdict

import mlx.core as mx

from ..errors import BadCheckpoint, UnsupportedModel, quote
from ..kernels.ops.k_quants import TENSOR_NAMES

Arrays = dict[str, mx.array]

SINGLE = re.compile(r"(.*\bexperts)\.(\d{1,6})\.(.+)")  # one tensor per expert
ROWS = (
    "", ".weight", ".scales", ".biases", ".bias", ".tq_packed", ".tq_norms", ".tq2_packed", ".tq2_scales", ".codes",
    *(f".{name}" for name in TENSOR_NAMES),
)  # fmt: skip
SHARED = (".tq_bits", ".codebook", ".awq_scale", ".awq_scales")
FUSED = re.compile(rf"(.*\bexperts)\.gate_up_proj({'|'.join(map(re.escape, (*SHARED, *ROWS)))})")
BARE = re.compile(r".*\bexperts\.(gate|up|down)_proj")  # a parameter without a module around it

NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def rename_experts(key: str) -> str:
    """Mixtral's and MLX's names as ours."""
    key = key.replace(".block_sparse_moe.", ".mlp.").replace(".switch_mlp.", ".experts.")
    return re.sub(r"(\bexperts\.\d+)\.(w[123])\.", lambda found: f"{found[1]}.{NAMES[found[2]]}.", key)


def stack_experts(arrays: Arrays, count: int) -> Arrays:
    """Single experts stacked, [E, 2I, ...] split into gate and up, names completed. Takes `arrays` apart."""
    stacks: Arrays = {}
    singles: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for name in list(arrays):
        array = arrays.pop(name)
        if found := SINGLE.fullmatch(name):
            put_single(singles[f"{found[1]}.{found[3]}"], name, int(found[2]), array)
        else:
            put(stacks, f"{name}.weight" if BARE.fullmatch(name) else name, array)
    for name, parts in singles.items():
        put(stacks, name, stack(name, parts, count))
    return split_gate_up(stacks)


def sanitize_experts(config, arrays: Arrays) -> Arrays:
    """`CausalLM.sanitize` of families with experts alone."""
    return stack_experts(arrays, config.num_experts)


def split_gate_up(arrays: Arrays) -> Arrays:
    """Fused gates and ups apart, whatever they are stored in: rows are halved, what all rows share goes to both."""
    split: Arrays = {}
    for name, array in arrays.items():
        if found := FUSED.fullmatch(name):
            shared = found[2] in SHARED
            gate, up = (array, array) if shared else split_halves(name, array)
            put(split, f"{found[1]}.gate_proj{found[2] or '.weight'}", gate)
            put(split, f"{found[1]}.up_proj{found[2] or '.weight'}", up)
        else:
            put(split, name, array)
    return split


def put(sanitized: Arrays, name: str, array: mx.array) -> None:
    if name in sanitized:
        raise BadCheckpoint(f"the checkpoint holds {quote(name)} twice, in two layouts; keep one")
    sanitized[name] = array


def put_single(parts: dict[int, mx.array], name: str, number: int, array: mx.array) -> None:
    if number in parts:  # "7" and "07"
        raise BadCheckpoint(f"the checkpoint holds expert {number} twice; one of them is {quote(name)}")
    parts[number] = array


def split_halves(name: str, array: mx.array) -> list[mx.array]:
    """Gate first, then up, along the rows of each expert."""
    if array.ndim not in (2, 3) or array.shape[1] % 2:
        raise BadCheckpoint(
            f"{quote(name)}: expected [experts, 2 x width, ...], gate rows then up rows; found {list(array.shape)}"
        )
    return list(mx.split(array, 2, axis=1))


def stack(name: str, parts: dict[int, mx.array], count: int) -> mx.array:
    if sorted(parts) != list(range(count)):
        lost = sorted(set(range(count)) - set(parts))[:5]
        detail = f"expert {lost[0]} is missing" if lost else f"expert {max(parts)} is one too many"
        raise BadCheckpoint(f"{quote(name)}: the config says {count} experts, the weights hold {len(parts)}: {detail}")
    shapes = {parts[i].shape for i in range(count)}
    dtypes = {parts[i].dtype for i in range(count)}
    if len(shapes) > 1 or len(dtypes) > 1:
        raise UnsupportedModel(
            f"{quote(name)}: the experts of one layer must be stored alike, "
            f"found shapes {sorted(shapes)} in {', '.join(sorted(str(d) for d in dtypes))}"
        )
    return mx.stack([parts.pop(i) for i in range(count)])
