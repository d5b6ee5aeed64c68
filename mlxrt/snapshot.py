"""A sequence's state as one file: tokens, identity, the blocks it names, and a digest over all of it.

Written beside its place and moved there when complete; read whole and verified before anything is given to the engine.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from .cache import SequenceState
from .errors import BadSnapshot
from .identity import check_same
from .runner import Runner
from .weights.safetensors import read_header


def save_state(path: Path, runner: Runner, state: SequenceState, identity: dict[str, str], extra: dict[str, Any]) -> None:
    arrays = runner.read(state)
    header = {"identity": identity, "tokens": list(state.tokens), "parts": [p.describe() for p in state.parts], "extra": extra}
    text = json.dumps(header, sort_keys=True)
    metadata = {"mlxrt": text, "sha256": seal(text, arrays)}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".safetensors")
    os.close(handle)
    try:
        mx.save_safetensors(temporary, arrays, metadata)
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def load_state(path: Path, runner: Runner, empty, identity: dict[str, str]) -> tuple[SequenceState, dict[str, Any]]:
    """The state, in blocks of its own, and what was saved with it. Nothing is taken from the pool before all is checked."""
    if not path.is_file():
        raise BadSnapshot(f"there is no saved state at {path}")
    read_header(path)  # mx.load trusts what it reads
    loaded = mx.load(str(path), format="safetensors", return_metadata=True)
    assert isinstance(loaded, tuple)
    arrays, metadata = loaded
    try:
        text = metadata["mlxrt"]
        if seal(text, arrays) != metadata["sha256"]:
            raise BadSnapshot(f"{path} is damaged: its digest does not match; it was not used")
        header = json.loads(text)
    except (KeyError, json.JSONDecodeError):
        raise BadSnapshot(f"{path} is no state saved by mlxrt") from None
    check_same(path, header["identity"], identity)
    return runner.write(tuple(header["tokens"]), header["parts"], arrays, empty), header["extra"]


def seal(text: str, arrays: dict[str, mx.array]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8)))
    return digest.hexdigest()
