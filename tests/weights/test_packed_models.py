"""The same weights in every packed layout, through the engine, against a float32 model of what they stand for."""

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

import mlx.nn as nn
import numpy as np
import pytest

from mlxrt.engine.cpu_kernels import open_cpu_kernels
from mlxrt.models.quantized.packed_linear import PackedEmbedding, PackedLinear
from tests.support import mlx_format_truth
from tests.support.tiny_files import CONFIG, float_weights, write_folder

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
BLOCKS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
TIED = CONFIG | {"tie_word_embeddings": True}
LAYERS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, PackedLinear, PackedEmbedding)
TOKENS = [3, 47, 0, 11, 11, 29, 8, 40, 1, 22]


def weights(config: dict) -> dict[str, mx.array]:
    """bfloat16, sized so that no layer drowns the others."""
    found = {}
    for name, value in float_weights(config, seed=3).items():
        size = 1 if value.ndim == 1 else value.shape[1] ** -0.5 * (1 if ".layers." in name else 4)
        found[name] = mx.array(value * size).astype(mx.bfloat16)
    return found


def packed(config: dict, choose) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """The tensors of the packed checkpoint, and the float32 ones of the model they stand for, made without MLX."""
    arrays, plain = {}, {}
    for name, value in weights(config).items():
        path = name.removesuffix(".weight")
        if value.ndim == 1 or choose(path) is None:
            arrays[name], plain[name] = value, value.astype(mx.float32)
            continue
        mode, bits, group = choose(path)
        parts = mx.quantize(value, group, bits, mode)
        arrays |= {f"{path}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}
        wide = (np.array(p if p.dtype in (mx.uint32, mx.uint8) else p.astype(mx.float32)) for p in parts)
        plain[name] = mx.array(mlx_format_truth.matrix(mode, bits, group, *wide).astype(np.float32))
    return arrays, plain


def scores(folder, **options):
    config = mlxrt.EngineConfig(dtype="float32", kv_memory="16M", **options)
    engine = mlxrt.load(str(folder), config)
    with engine:
        kinds = {
            path: module.weight.dtype for path, module in engine.model.named_modules() if isinstance(module, LAYERS)
        }
        return np.array(engine.score(TOKENS)), kinds


def plain_dtype() -> mx.Dtype:
    """Of bfloat16 matrices in memory: CPU kernels read them as they are stored."""
    return mx.float32 if open_cpu_kernels(mlxrt.EngineConfig()) is None else mx.bfloat16


def check(tmp_path, choose, config=CONFIG) -> dict[str, mx.Dtype]:
    arrays, plain = packed(config, choose)
    truth, _ = scores(write_folder(tmp_path / "plain", plain, config))
    found, kinds = scores(write_folder(tmp_path / "packed", arrays, config), dequantise=False)
    assert truth.std() > 1 and np.abs(found - truth).max() < 1e-3
    return kinds


def test_bfloat16(tmp_path):
    assert set(check(tmp_path, lambda path: None).values()) == {plain_dtype()}


@pytest.mark.parametrize("layout", AFFINE + BLOCKS, ids=str)
def test_layout(tmp_path, layout):
    kinds = check(tmp_path, lambda path: layout)
    assert len(kinds) == 2 + 2 * 4 and set(kinds.values()) == {mx.uint32}  # q, k, v are joined, gate and up too


def test_mixed_bits(tmp_path):
    kinds = [*BLOCKS, ("affine", 3, 32), ("affine", 8, 64), ("affine", 2, 128), None]
    where = {name.removesuffix(".weight"): kinds[i % len(kinds)] for i, name in enumerate(weights(CONFIG))}
    found = check(tmp_path, where.get)
    left = [path for path, kind in where.items() if kind is None and path in found]
    assert left and all(found[path] == plain_dtype() for path in left)
    assert sum(dtype == mx.uint32 for dtype in found.values()) > len(left)


@pytest.mark.parametrize("layout", [("affine", 4, 64), ("affine", 6, 32), *BLOCKS], ids=str)
def test_packed_tied_embedding(tmp_path, layout):
    kinds = check(tmp_path, lambda path: layout if path == "model.embed_tokens" else None, TIED)
    assert kinds.pop("model.embed_tokens") == mx.uint32 and set(kinds.values()) == {plain_dtype()}
