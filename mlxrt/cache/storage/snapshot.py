"""Snapshot: a sequence's state as one file, with its tokens, the model's identity and the KV blocks.

A file is read and verified in full before the engine sees any of it, so a refused file leaves nothing behind.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import BadSnapshot, NoRoom, WontFit
from ...weights.identity import check_same
from .. import LayerState, SequenceState
from ..files import remove_partial_files
from ..memory import KVPools
from .checksummed import ChecksummedFile, read_checksummed, write_checksummed

KIND = "state"


def save_state(path: Path, pools: KVPools, state: SequenceState, identity: dict[str, str], extra: dict) -> str:
    """Write the file atomically and return its digest. The decode tail must be in the pools already."""
    arrays = pools.read(state)
    parts = [part.describe() for part in state.parts]
    header = {"kind": KIND, "identity": identity, "tokens": list(state.tokens), "parts": parts, "extra": extra}
    remove_partial_files(path.parent)
    return write_checksummed(path, header, arrays)


def load_state(
    path: Path,
    pools: KVPools,
    empty: tuple[LayerState, ...],
    identity: dict[str, str],
    digest: str | None = None,
    evict: Callable[[Any], bool] = lambda pool: False,
) -> tuple[SequenceState, dict[str, Any]]:
    """The state, in newly allocated blocks, and the `extra` saved with it.

    `digest`: the only one accepted. `evict` frees something in a pool; False when nothing is left to evict."""
    try:
        file = read_checksummed(path)
    except FileNotFoundError:
        raise BadSnapshot(f"there is no saved state at {path}") from None
    if digest is not None and file.digest != digest:
        raise BadSnapshot(
            f"{path} is another file than the index names (sha256 {file.digest[:12]}, not {digest[:12]}); "
            "it was not used"
        )
    header = check_header(path, file.header)
    check_same(path, header["identity"], identity)
    check_arrays(path, file, pools, empty)
    while True:
        try:
            return pools.write(tuple(header["tokens"]), header["parts"], file.arrays), header["extra"]
        except NoRoom as full:  # the device may hold less than the pool was planned for: only allocating tells
            if not evict(full.pool):
                raise WontFit(f"{path} does not fit: {full}; wait, or raise kv_memory") from None


def check_header(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Check the type of every field of a saved state's header."""
    tokens, parts = header.get("tokens"), header.get("parts")
    valid = (
        header.get("kind") == KIND
        and isinstance(header.get("identity"), dict)
        and isinstance(header.get("extra"), dict)
        and isinstance(tokens, list)
        and bool(tokens)
        and all(type(t) is int and 0 <= t < 1 << 31 for t in tokens)
        and isinstance(parts, list)
        and all(isinstance(p, dict) and all(type(v) is int and v >= 0 for v in p.values()) for p in parts)
    )
    if not valid:
        raise BadSnapshot(f"{path} holds no saved conversation, though mlxrt may have written it; it was not used")
    return header


def check_arrays(path: Path, file: ChecksummedFile, pools: KVPools, empty: tuple[LayerState, ...]) -> None:
    """Check that every array is there and fits its pool, and that all of a group hold as many blocks."""
    parts = file.header["parts"]
    if len(parts) != len(empty) or any(set(p) != set(e.describe()) for p, e in zip(parts, empty)):
        raise BadSnapshot(f"{path} does not describe the {len(empty)} kinds of cache of this model; it was not used")
    blocks: dict[int, int] = {}
    for i, g in pools.group_of.items():
        for n, pool in enumerate(pools.arrays[i]):
            found = file.arrays.get(f"layer.{i}.{n}")
            if found is None or found.dtype != pool.dtype or found.shape[1:] != pool.shape[1:]:
                raise BadSnapshot(f"{path} has no layer.{i}.{n} of {pool.dtype} {pool.shape[1:]}; it was not used")
            if blocks.setdefault(g, found.shape[0]) != found.shape[0] or not found.shape[0]:
                raise BadSnapshot(f"{path}: layer.{i}.{n} holds {found.shape[0]} blocks, others of its kind differ")
