"""A sequence's state as one file: tokens, identity and the blocks it names.

Read whole and verified before anything is given to the engine, so a file that is refused leaves nothing behind.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import BadSnapshot, WontFit
from ...weights.identity import check_same
from .. import BlockPool, LayerState, SequenceState
from ..memory import KVPools
from .checksummed import Sealed, read_sealed, sweep, write_sealed

KIND = "state"


def save_state(
    path: Path, pools: KVPools, state: SequenceState, identity: dict[str, str], extra: dict[str, Any]
) -> str:
    """Written atomically; the digest of the file. The decode tail must be in the pools already."""
    arrays = pools.read(state)
    parts = [part.describe() for part in state.parts]
    header = {"kind": KIND, "identity": identity, "tokens": list(state.tokens), "parts": parts, "extra": extra}
    sweep(path.parent)
    return write_sealed(path, header, arrays)


def load_state(
    path: Path,
    pools: KVPools,
    empty: tuple[LayerState, ...],
    identity: dict[str, str],
    digest: str | None = None,
    evict: Callable[[BlockPool], bool] = lambda pool: False,
) -> tuple[SequenceState, dict[str, Any]]:
    """The state, in blocks of its own, and what was saved with it.

    `digest`: of the one file that will do. `evict` lets go of something in a pool, as long as there is anything."""
    try:
        sealed = read_sealed(path)
    except FileNotFoundError:
        raise BadSnapshot(f"there is no saved state at {path}") from None
    if digest is not None and sealed.digest != digest:
        raise BadSnapshot(
            f"{path} is another file than the index names (sha256 {sealed.digest[:12]}, not {digest[:12]}); "
            "it was not used"
        )
    header = check_header(path, sealed.header)
    check_same(path, header["identity"], identity)
    for g, places in check_arrays(path, sealed, pools, empty).items():
        pool = pools.groups[g].pool
        while pool.idle < places:
            if not evict(pool):
                raise WontFit(f"{path} needs {places} blocks, {pool.idle} are free; wait, or raise kv_memory")
    return pools.write(tuple(header["tokens"]), header["parts"], sealed.arrays, empty), header["extra"]


def check_header(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """A saved state's header, every field of the type it must have."""
    tokens, parts = header.get("tokens"), header.get("parts")
    sound = (
        header.get("kind") == KIND
        and isinstance(header.get("identity"), dict)
        and isinstance(header.get("extra"), dict)
        and isinstance(tokens, list)
        and bool(tokens)
        and all(type(t) is int and 0 <= t < 1 << 31 for t in tokens)
        and isinstance(parts, list)
        and all(isinstance(p, dict) and all(type(v) is int and v >= 0 for v in p.values()) for p in parts)
    )
    if not sound:
        raise BadSnapshot(f"{path} holds no saved conversation, though mlxrt may have written it; it was not used")
    return header


def check_arrays(path: Path, sealed: Sealed, pools: KVPools, empty: tuple[LayerState, ...]) -> dict[int, int]:
    """The places each group needs, when every array is there and fits its pool, all of a group equally many."""
    parts = sealed.header["parts"]
    if len(parts) != len(empty) or any(set(p) != set(e.describe()) for p, e in zip(parts, empty)):
        raise BadSnapshot(f"{path} does not describe the {len(empty)} kinds of memory of this model; it was not used")
    places: dict[int, int] = {}
    for i, g in pools.group_of.items():
        for n, pool in enumerate(pools.arrays[i]):
            found = sealed.arrays.get(f"layer.{i}.{n}")
            if found is None or found.dtype != pool.dtype or found.shape[1:] != pool.shape[1:]:
                raise BadSnapshot(f"{path} has no layer.{i}.{n} of {pool.dtype} {pool.shape[1:]}; it was not used")
            if places.setdefault(g, found.shape[0]) != found.shape[0] or not found.shape[0]:
                raise BadSnapshot(f"{path}: layer.{i}.{n} holds {found.shape[0]} places, others of its kind differ")
    return places
