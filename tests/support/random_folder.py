"""A checkpoint folder with random weights of given shapes."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np


def write_random_folder(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int) -> Path:
    random = np.random.default_rng(seed)
    arrays = {name: random.standard_normal(shape, np.float32) * shape[-1] ** -0.25 for name, shape in shapes.items()}
    arrays["lm_head.weight"] *= 4  # so that tokens differ clearly
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), {k: mx.array(v) for k, v in arrays.items()})
    return folder
