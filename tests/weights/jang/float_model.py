"""The truth to compare logits with: mlx-lm's module in float32, holding matrices that somebody else decoded."""

import importlib

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

MODULES = {"minimax_m2": "minimax"}


def float_logits(config: dict, arrays: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits [n, vocab] of a float model with `arrays`, in mlx-lm's names."""
    kind = config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{MODULES.get(kind, kind)}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = {name: mx.array(np.asarray(array, dtype=np.float32)) for name, array in arrays.items()}
    weights = model.sanitize(weights) if hasattr(model, "sanitize") else weights
    wanted = {name for name, _ in tree_flatten(model.parameters())}
    assert wanted == set(weights), (sorted(wanted - set(weights))[:3], sorted(set(weights) - wanted)[:3])
    model.load_weights(list(weights.items()))
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def close(got: np.ndarray, true: np.ndarray) -> float:
    """The largest difference over max(1, the largest logit): at most 1e-4 is asked for."""
    return float(np.abs(got - true).max() / max(1.0, np.abs(true).max()))
