"""Four ways in which published checkpoints mislead a loader, and that without its rule each of them does."""

import json
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlxrt
from mlxrt.models import sanitize_hybrid as hybrid_layouts
from mlxrt.models import sanitize_moe as expert_layouts
from mlxrt.weights.formats.quantized import MLXFormat, detect_mlx, hint
from mlxrt.weights.load import detect

from ...support.log_lines import capture_log
from . import definition as of
from .float_model import close
from .makers import MAKERS
from .test_checkpoints import LIMIT, logits

HYBRID = Path(__file__).parents[2] / "parity" / "qwen3_5_moe"
TOKENS = np.random.default_rng(5).integers(0, 64, 16).tolist()


def trust_the_config(patch):
    """A loader that believes config.json where the product of bits and group fits."""

    def believe(path, shape, arrays, hints):
        found, claimed = detect_mlx(path, shape[-1], arrays), hint(hints.config, path)
        return claimed if claimed and claimed.bits * claimed.group_size == found.bits * found.group_size else found

    patch.setitem(detect.READERS, ".scales", believe)


def trust_the_global_pair(patch):
    def believe(path, shape, arrays, hints):
        claimed = hints.config["quantization"]
        return MLXFormat("affine", claimed["bits"], claimed["group_size"])

    patch.setitem(detect.READERS, ".scales", believe)


def leave_experts_single(patch):
    patch.setattr(expert_layouts, "SINGLE", re.compile("(?!)"))


def never_rotate(patch):
    patch.setitem(detect.READERS, ".scales", lambda path, shape, arrays, hints: detect_mlx(path, shape[-1], arrays))


TRAPS = {
    "wrong_config": trust_the_config,
    "legacy_config": trust_the_global_pair,
    "jangtq_singly": leave_experts_single,
    "rotated_dense": never_rotate,
    "rotated_affine": never_rotate,
}


@pytest.mark.parametrize("kind", TRAPS)
def test_without_its_rule_the_bundle_is_misread(kind, tmp_path, monkeypatch):
    """test_checkpoints.py has the same checkpoints with the rule, where they are read exactly."""
    checkpoint = MAKERS[kind](seed=1)
    true = logits(checkpoint.write_true(tmp_path / "true"), True, TOKENS)
    folder = checkpoint.write(tmp_path / "checkpoint")
    assert close(logits(folder, True, TOKENS), true) < LIMIT
    TRAPS[kind](monkeypatch)
    try:
        off = close(logits(folder, True, TOKENS), true)
    except (mlxrt.MlxrtError, ValueError):  # ValueError: MLX on a layout that the words do not have
        return
    assert off > 100 * LIMIT


def test_contradiction_is_said_once(tmp_path):
    logged = capture_log()
    logits(MAKERS["wrong_config"](seed=2).write(tmp_path), True, TOKENS)
    [line] = [line for line in logged if "contradicts" in line]
    assert "8 modules" in line and "affine 8 bit group 64" in line and "4 bit group 128" in line


def test_wrong_labels_are_logged(tmp_path):
    logged = capture_log()
    logits(MAKERS["jangtq_singly"](seed=2).write(tmp_path / "a"), False, TOKENS)
    assert any("bf16" in line and "6 modules are JANGTQ" in line for line in logged)
    logged.clear()
    logits(MAKERS["jangtq"](seed=2).write(tmp_path / "b"), False, TOKENS)
    assert any("mxtq_bits says 2 for down_proj, 2 modules have 4" in line for line in logged)


def hybrid(folder: Path, *, names: str, conv: str, whole: bool, stamp: bool) -> tuple[Path, Path]:
    """(checkpoint, its float model) of the parity fixture: text or vision names, MLX or HF convolutions, norms + 1."""
    config = json.loads((HYBRID / "config.json").read_text())
    stored = {n: np.array(a) for n, a in mx.load(str(HYBRID / "model.safetensors")).items() if "visual" not in n}
    true, checkpoint = dict(stored), {}
    for name, array in stored.items():
        own = name.replace("model.language_model.", "language_model.model." if names == "vision" else "model.")
        own = own.replace("lm_head", "language_model.lm_head") if names == "vision" else own
        if "self_attn" in name and array.ndim == 2:
            tensors, true[name] = of.affine(array, 4, 32)
            checkpoint |= {own.replace("weight", part): a for part, a in tensors.items()}
            continue
        if name.endswith("conv1d.weight") and conv == "mlx":
            array = np.moveaxis(array, 2, 1)
        if hybrid_layouts.LESS_ONE.fullmatch(name.replace("language_model.", "")) and whole:
            array = array + 1
        checkpoint[own] = array
    stamps = {"jang_norms_pre_shifted": True} if stamp else {}
    plain = of.write(folder / "true", config, {n: a.astype(np.float32) for n, a in true.items()})
    return of.write(folder / "checkpoint", {**config, **stamps}, checkpoint, {"format": "jang"}), plain


NORMS = [
    {"names": "vision", "conv": "mlx", "whole": False, "stamp": False},
    {"names": "text", "conv": "mlx", "whole": True, "stamp": True},
    {"names": "text", "conv": "mlx", "whole": False, "stamp": False},  # before the stamp existed
    {"names": "text", "conv": "hf", "whole": False, "stamp": False},  # JANGTQ
    {"names": "text", "conv": "hf", "whole": True, "stamp": True},
    {"names": "vision", "conv": "hf", "whole": True, "stamp": False},
]


@pytest.mark.parametrize("how", NORMS, ids=lambda how: " ".join(f"{k}={v}" for k, v in how.items()))
def test_norms_are_detected_by_flag_and_mean(how, tmp_path, monkeypatch):
    folder, plain = hybrid(tmp_path, **how)
    true = logits(plain, True, TOKENS)
    assert close(logits(folder, True, TOKENS), true) < LIMIT
    detect_norms = hybrid_layouts.norms_include_one
    monkeypatch.setattr(hybrid_layouts, "norms_include_one", lambda config, arrays: not detect_norms(config, arrays))
    assert close(logits(folder, True, TOKENS), true) > 100 * LIMIT


def test_half_a_rule_for_norms_is_not_enough(tmp_path, monkeypatch):
    """mlx-lm's rule: MLX's convolutions mean that norms are whole."""
    folder, plain = hybrid(tmp_path, **NORMS[0])
    monkeypatch.setattr(
        hybrid_layouts,
        "norms_include_one",
        lambda config, arrays: any(hybrid_layouts.is_mlx_conv(a) for n, a in arrays.items() if "conv1d" in n),
    )
    assert close(logits(folder, True, TOKENS), logits(plain, True, TOKENS)) > 100 * LIMIT


def test_loading_leaves_other_models_alone(tmp_path):
    """A float model answers the same to the last bit before, while and after a JANGTQ model is loaded."""
    checkpoint = MAKERS["jangtq"](seed=3)
    plain, folder = checkpoint.write_true(tmp_path / "true"), checkpoint.write(tmp_path / "checkpoint")
    with mlxrt.load(str(plain)) as first:
        before = np.array(first.score(TOKENS))
        with mlxrt.load(str(folder), mlxrt.EngineConfig(dequantise=False)) as other:
            other.score(TOKENS)
            assert np.array_equal(np.array(first.score(TOKENS)), before)
        assert np.array_equal(np.array(first.score(TOKENS)), before)
    assert np.array_equal(logits(plain, True, TOKENS), before)
