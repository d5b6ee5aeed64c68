"""Checkpoints of 16 bits on a CPU: matrices stay as they are stored, and every family's tokens are plain MLX's."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlxrt
from mlxrt.models import find
from mlxrt.models.quantized.packed_linear import PackedEmbedding, PackedExpertLinear, PackedLinear
from mlxrt.weights.random_models import random_weights, shape_config

from ..kernels.test_families import SHAPES, SMALL, small_sizes
from ..support.kernels.cpu_library import compiled_library
from ..support.tiny_files import CONFIG, float_weights, write_folder, write_gguf
from .test_cpu_families import HYBRID, requests
from .test_cpu_step import replays

pytestmark = pytest.mark.xdist_group("cpu_kernels")  # one worker compiles the library

PACKED = PackedLinear | PackedEmbedding | PackedExpertLinear
PROMPTS = [tuple((5 * i + n) % 47 for i in range(n)) for n in (21, 4, 40)]


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    return compiled_library()


def write_half(folder: Path, dtype: mx.Dtype, config: dict = CONFIG | {"max_position_embeddings": 256}) -> str:
    weights = {name: a * (0.2 if a.ndim > 1 else 1) for name, a in float_weights(config, seed=3).items()}
    return str(write_folder(folder, {name: mx.array(a).astype(dtype) for name, a in weights.items()}, config))


def packed(engine) -> list:
    return [module for module in engine.model.modules() if isinstance(module, PACKED)]


def answer(engine) -> list:
    asked = [
        mlxrt.Request(tokens=p, params=mlxrt.SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, **how))
        for p, how in zip(PROMPTS, ({}, {"temperature": 1.0, "seed": 2}, {"temperature": 0.6, "top_k": 9, "seed": 1}))
    ]
    alone = [(c.tokens, c.logprobs) for c in map(engine.generate, asked)]
    assert [(c.tokens, c.logprobs) for c in engine.generate(asked)] == alone  # cached, beside each other
    return alone


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_matrices_stay_as_they_are_stored(tmp_path, dtype):
    folder = write_half(tmp_path / "model", dtype)
    with mlxrt.load(folder) as engine:
        found = answer(engine)
        assert replays(engine) > 100
        assert {m.weight.dtype for m in packed(engine)} == {dtype} and engine.model.dtype == mx.float32
        assert sum(m.weight.nbytes for m in packed(engine)) == sum(
            2 * a.size for a in float_weights(CONFIG).values() if a.ndim > 1
        )
    with mlxrt.load(folder, dequantise=True) as engine:
        assert not packed(engine) and engine.model.kernels.cpu is None
        plain = engine.generate(mlxrt.Request(tokens=PROMPTS[0], params=mlxrt.SamplingParams(max_tokens=9)))
    assert plain.tokens[:9] == found[0][0][:9]
    with mlxrt.load(folder, kernels="reference", prefix_cache=False) as engine:
        asked = [mlxrt.Request(tokens=p, params=mlxrt.SamplingParams(max_tokens=40, ignore_eos=True)) for p in PROMPTS]
        assert engine.generate(asked[0]).tokens == found[0][0]


def test_a_gguf_of_float16(tmp_path):
    config = CONFIG | {"max_position_embeddings": 256}
    weights = {name: np.float32(np.float16(0.2 * a)) if a.ndim > 1 else a for name, a in float_weights(config).items()}
    path = str(write_gguf(tmp_path / "model.gguf", weights, config, "F16"))
    with mlxrt.load(path) as engine:
        found = answer(engine)
        assert {m.weight.dtype for m in packed(engine)} == {mx.float16}
    with mlxrt.load(str(write_folder(tmp_path / "model", weights, config)), prefix_cache=False) as engine:
        assert not packed(engine)  # float32: MLX's
        request = mlxrt.Request(tokens=PROMPTS[0], params=mlxrt.SamplingParams(max_tokens=40, ignore_eos=True))
        assert engine.generate(request).tokens == found[0][0]


def test_rows_that_no_kernel_reads_become_float32(tmp_path):
    config = CONFIG | {"max_position_embeddings": 256, "intermediate_size": 200}
    with mlxrt.load(write_half(tmp_path / "model", mx.bfloat16, config)) as engine:
        down = [layer.mlp.down_proj for layer in engine.model.model.layers]
        assert all(type(m) is nn.Linear and m.weight.dtype == mx.float32 for m in down)
        assert packed(engine)
        found = engine.generate(mlxrt.Request(tokens=PROMPTS[0], params=mlxrt.SamplingParams(max_tokens=30)))
    with mlxrt.load(write_half(tmp_path / "same", mx.bfloat16, config), kernels="reference") as plain:
        want = plain.generate(mlxrt.Request(tokens=PROMPTS[0], params=mlxrt.SamplingParams(max_tokens=30)))
    assert found.tokens == want.tokens


def test_activations_of_8_bits_do_not_apply(tmp_path):
    with pytest.raises(mlxrt.BadRequest, match="cpu_activations"):
        mlxrt.load(write_half(tmp_path / "model", mx.bfloat16), cpu_activations="int8")


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_of_every_family_are_those_of_plain_mlx(name, tmp_path):
    config = dict(shape_config(name))
    inner = config["text_config"] = dict(config["text_config"]) if "text_config" in config else config
    inner |= {key: value for key, value in (SMALL | small_sizes(name)).items() if inner.get(key) is not None}
    if inner is config:
        del config["text_config"]
    model = find(config)(find(config).parse(config))
    random_weights(model, None, mx.bfloat16)
    folder = str(write_folder(tmp_path / "model", dict(tree_flatten(model.parameters())), config))
    found = []
    for kernels in ("reference", "auto"):
        with mlxrt.load(folder, kernels=kernels, max_context=256, kv_memory="64M") as engine:
            found.append([engine.generate(request).tokens for request in requests()])
            if kernels == "auto":
                assert len(packed(engine)) > 5 and all(m.weight.dtype == mx.bfloat16 for m in packed(engine))
                assert name in HYBRID or replays(engine) > 50
    assert found[0] == found[1]
