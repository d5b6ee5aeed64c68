"""Exports a model to a Hugging Face folder in the user's cache, so that two engines load the very same weights.

`plain` holds the weights dequantized to float32, `packed` the 4 and 8 bit blocks of a GGUF file as they are.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache.files import PARTIAL
from ..engine.load import open_checkpoint
from ..errors import BadRequest
from ..weights import Checkpoint, build
from ..weights.identity import weights_digest
from ..weights.source.alias import ALIASES, DEFAULT
from ..weights.source.cache_dir import cache_root, exclusive, writing
from ..weights.source.resolve import ResolvedModel, resolve
from .token_cost import parameters

GROUP = 32  # of GGUF's Q4_1 and Q8_0


def export(kind: str, resolved: ResolvedModel | None = None) -> Path:
    """The folder of kind `plain` or `packed` of a model (default: the default model), made where it is missing."""
    resolved = resolved or resolve(DEFAULT)
    if resolved.path is None:
        raise BadRequest(f"{resolved.name} has no files to export")
    checkpoint = open_checkpoint(resolved)
    folder = cache_root() / "bench" / f"{folder_name(resolved, checkpoint)}-{kind}"
    if folder.is_dir():
        return folder
    with writing(folder.parent), exclusive(folder.parent):
        if folder.is_dir():
            return folder  # another process made it meanwhile
        made = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder.parent))
        try:
            write_model(made, checkpoint, kind)
            os.replace(made, folder)  # readers see the complete folder or none
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def folder_name(resolved: ResolvedModel, checkpoint: Checkpoint) -> str:
    if resolved.name in ALIASES:
        return f"{resolved.name}-{ALIASES[resolved.name].sha256[:12]}"
    assert resolved.path is not None
    return f"{resolved.path.stem}-{weights_digest(tuple(checkpoint.files()))[:12]}"


def write_model(made: Path, checkpoint: Checkpoint, kind: str) -> None:
    config = dict(checkpoint.config)
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    if kind == "plain":
        weights = parameters(build(checkpoint, dtype=mx.float32, dequantise=True))
        config["torch_dtype"] = "float32"
    else:
        weights = checkpoint.load()
        config["quantization"] = quantization_config(weights)
    mx.save_safetensors(str(made / "model.safetensors"), weights, metadata={"format": "mlx"})
    (made / "config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")
    checkpoint.save_tokenizer(made)


def quantization_config(weights: dict[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's `quantization`: the bits of most matrices, then the others by name."""
    bits = {}
    for name in [n.removesuffix(".scales") for n in weights if n.endswith(".scales")]:
        columns = weights[f"{name}.scales"].shape[1] * GROUP
        bits[name] = weights[f"{name}.weight"].shape[1] * 32 // columns
    most = max(set(bits.values()), key=list(bits.values()).count)
    others = {name: {"group_size": GROUP, "bits": b} for name, b in bits.items() if b != most}
    return {"group_size": GROUP, "bits": most, **others}
