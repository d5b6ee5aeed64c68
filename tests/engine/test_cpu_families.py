"""Published shapes made small and packed, by CPU kernels: the tokens of plain MLX, from recorded decode steps where a
family has nothing but kernels."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlxrt
from mlxrt.models import find
from mlxrt.weights.random_models import published_configs, random_weights, shape_config

from ..kernels.test_families import LAYERS, SHAPES, SMALL, small_sizes
from ..support.kernels.cpu_library import compiled_library
from ..support.log_lines import capture_log
from ..support.tiny_files import write_folder
from .test_cpu_step import replays

pytestmark = pytest.mark.xdist_group("cpu_kernels")  # one worker compiles the library

HYBRID = {"qwen3.5-9b", "qwen3.5-35b-a3b"}  # recurrent layers are computed by MLX
PROMPTS = [tuple((7 * i + n) % 191 for i in range(n)) for n in (21, 5, 40)]
PARAMS = (
    {"max_tokens": 40},
    {"max_tokens": 12, "temperature": 1.0, "top_k": 20, "seed": 3},
    {"max_tokens": 30, "temperature": 0.7, "seed": 4, "repetition_penalty": 1.2},
)


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    return compiled_library()


def requests():
    return [
        mlxrt.Request(tokens=tokens, params=mlxrt.SamplingParams(ignore_eos=True, **params))
        for tokens, params in zip(PROMPTS, PARAMS)
    ]


@pytest.mark.parametrize("packing", ["@4bit", "@mxfp4"])
@pytest.mark.parametrize("name", SHAPES)
def test_tokens_are_those_of_plain_mlx(name, packing, monkeypatch):
    config = dict(published_configs()[name])
    inner = config["text_config"] = dict(config["text_config"]) if "text_config" in config else config
    inner |= {key: value for key, value in (SMALL | small_sizes(name)).items() if inner.get(key) is not None}
    if inner is config:
        del config["text_config"]
    monkeypatch.setitem(published_configs(), name, config)
    options = {"max_context": 256, "kv_memory": "64M"}
    with mlxrt.load(f"shape:{name}{packing}", kernels="reference", **options) as plain:
        want = [plain.generate(request).tokens for request in requests()]
    with mlxrt.load(f"shape:{name}{packing}", **options) as engine:
        assert [engine.generate(request).tokens for request in requests()] == want
        assert [c.tokens for c in engine.generate(requests())] == want
        if name not in HYBRID:
            assert replays(engine) > 100
        assert len(engine.model.layers if hasattr(engine.model, "layers") else engine.model.model.layers) >= LAYERS


@pytest.mark.parametrize("packed", [("down_proj",), ("gate_proj", "up_proj"), ("gate_proj", "down_proj")], ids=str)
def test_mixtures_of_which_some_matrices_are_float(packed, tmp_path):
    """Kernels multiply what is packed and are asked for nothing else."""
    config = shape_config("qwen3-30b-a3b")
    config |= {key: value for key, value in SMALL.items() if config.get(key) is not None}
    model = find(config)(find(config).parse(config))
    random_weights(model, None, mx.float32)
    arrays = {}
    for name, array in tree_flatten(model.parameters()):
        if ".experts." in name and any(part in name for part in packed):
            parts = zip(("weight", "scales", "biases"), mx.quantize(array, 32, 4))
            arrays |= {name.replace("weight", part): made for part, made in parts}
        else:
            arrays[name] = array
    folder = write_folder(tmp_path / "model", arrays, config | {"quantization": {"group_size": 32, "bits": 4}})
    found, said = [], capture_log("moe_grouped")
    for kernels in ("reference", "auto"):
        with mlxrt.load(str(folder), kernels=kernels, dequantise=False, kv_memory="64M") as engine:
            found.append([engine.generate(request).tokens for request in requests()])
    assert found[0] == found[1] and not said
