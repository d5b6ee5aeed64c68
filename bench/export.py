"""The default model as Hugging Face folders in the user's cache, so that two engines load the very same weights.

`plain` holds the GGUF's weights unpacked to float32, `packed` the 4 and 8 bit words as they lie in the GGUF.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrt.text.gguf_folder import write_folder
from mlxrt.weights import GgufCheckpoint, build
from mlxrt.weights.alias import ALIASES
from mlxrt.weights.cachedir import cache_root, writing
from mlxrt.weights.source import locate

MODEL = "smollm2"
GROUP = 32  # of GGUF's Q4_1 and Q8_0


def export(kind: str) -> Path:
    """The folder of kind `plain` or `packed`, made when it is not there."""
    folder = cache_root() / "bench" / f"{MODEL}-{ALIASES[MODEL].sha256[:12]}-{kind}"
    if folder.is_dir():
        return folder
    source = locate(MODEL).path
    assert source is not None  # an alias is a file
    checkpoint = GgufCheckpoint(source, MODEL)
    with writing(folder.parent):
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            config = dict(checkpoint.config)
            if kind == "plain":
                weights = unpacked(checkpoint)
            else:
                weights = checkpoint.load()
                config["quantization"] = layouts(weights)
            mx.save_safetensors(str(made / "model.safetensors"), weights, metadata={"format": "mlx"})
            write(made / "config.json", config)
            write_folder(made, checkpoint.metadata)
            os.replace(made, folder)  # a reader sees all of the folder or none
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def unpacked(checkpoint: GgufCheckpoint) -> dict[str, mx.array]:
    model = build(checkpoint, dtype=mx.float32, dequantise=True)
    return dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def layouts(weights: dict[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's `quantization`: what most matrices have, then the others by name."""
    bits = {}
    for name in [n.removesuffix(".scales") for n in weights if n.endswith(".scales")]:
        columns = weights[f"{name}.scales"].shape[1] * GROUP
        bits[name] = weights[f"{name}.weight"].shape[1] * 32 // columns
    most = max(set(bits.values()), key=list(bits.values()).count)
    others = {name: {"group_size": GROUP, "bits": b} for name, b in bits.items() if b != most}
    return {"group_size": GROUP, "bits": most, **others}


def write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
