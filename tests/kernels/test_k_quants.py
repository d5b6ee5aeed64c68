"""GGUF's K-quants split for GPU kernels: the same numbers, no more memory than the file, through whole models."""

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrt import EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Engine, Source
from mlxrt.engine.weight_size import checkpoint_bytes
from mlxrt.kernels import Kernels, make_gpu
from mlxrt.kernels.ops.k_quants import SPLIT_KINDS, dequantize_blocks, split_blocks
from mlxrt.kernels.ops.quantized import split_matrix
from mlxrt.kernels.testing import sample_blocks
from mlxrt.models.quantized.packed_linear import PackedEmbedding, PackedExpertLinear, PackedLinear
from mlxrt.weights import GgufCheckpoint, build
from mlxrt.weights.formats.gguf.tensors import SPLIT

from ..support.k_quant_files import write_pair
from ..support.metal_sim import Simulator
from ..support.parity import list_rows
from ..support.qwen2_moe_folder import write_qwen2_moe
from ..support.tiny_files import CONFIG, float_weights, write_folder, write_gguf

MOST_MEMORY = 1.06  # of the file's tensors
LLAMA = CONFIG | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
KINDS = {"q_proj": "q4_k", "k_proj": "q4_k", "v_proj": "q6_k", "o_proj": "q5_k", "gate": "q3_k", "up": "q3_k"}
KINDS |= {"down": "q2_k", "embed": "iq4_xs", "lm_head": "iq4_nl"}
PROMPT = tuple(7 * i % 47 for i in range(21))


def blocks_of(kind: str, shape: tuple[int, ...], size: float = 0.01) -> mx.array:
    split = SPLIT_KINDS[kind]
    return sample_blocks(kind, shape, size, split.nbytes, split.elements)


@pytest.mark.parametrize("kind", SPLIT_KINDS)
def test_splitting_changes_no_value(kind, monkeypatch):
    monkeypatch.setattr("mlxrt.kernels.ops.k_quants.SPLIT_AT_ONCE", 2048)  # two rows at a time
    mx.random.seed(1)
    blocks = blocks_of(kind, (3, 5, 768))
    matrix = split_matrix(kind, split_blocks(kind, blocks))
    assert matrix.plain().dtype == mx.float32
    assert mx.array_equal(matrix.plain(), dequantize_blocks(blocks.reshape(15, -1), kind).reshape(3, 5, 768))
    held = sum(a.nbytes for a in (matrix.weight, matrix.scales, matrix.biases) if a is not None)
    assert held <= MOST_MEMORY * blocks.nbytes
    assert held * SPLIT_KINDS[kind].nbytes == blocks.nbytes * SPLIT_KINDS[kind].split_bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A GGUF file of every kind that is split, values of another than keys, and a folder of the numbers in it."""
    stored, plain, kinds = {}, {}, {}
    mx.random.seed(4)
    for name, array in float_weights(LLAMA, seed=5).items():
        stored[name] = plain[name] = array
        if array.ndim == 2:
            kind = next(k for part, k in KINDS.items() if part in name)
            size = 0.3 if "embed" in name else 0.02
            blocks = blocks_of(kind, array.shape, size / (8 << SPLIT_KINDS[kind].bits))
            stored[name], plain[name], kinds[name] = np.array(blocks), dequantize_blocks(blocks, kind), kind.upper()
    folder = tmp_path_factory.mktemp("k_quants")
    return write_gguf(folder / "k.gguf", stored, LLAMA, kinds=kinds), write_folder(folder / "plain", plain, LLAMA)


def open_split(file, mode: str, dtype: mx.Dtype | None = mx.float32) -> Engine:
    checkpoint = GgufCheckpoint(file)
    checkpoint.k_quants = SPLIT
    model = build(checkpoint, dtype=dtype)
    model.fuse(Kernels(mode, make_gpu("metal", Simulator().metal_kernel)))
    config = EngineConfig(max_context=64, prefix_cache=False, compile=False, ahead=0)
    return Engine(model, config, source=Source("split"))


def answer(engine: Engine, prompt: tuple[int, ...] = PROMPT, count: int = 4) -> list[int]:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return list(engine.generate(Request(tokens=prompt, params=params)).tokens)


def test_a_file_is_computed_from_split_matrices(files):
    file, folder = files
    with mlxrt.load(str(folder), dtype="float32") as engine:
        truth, tokens = np.array(engine.score(list(PROMPT))), answer(engine)
    for mode in ("strict", "reference"):
        with open_split(file, mode) as engine:
            found = np.array(engine.score(list(PROMPT)))
            assert np.abs(found - truth).max() < 1e-5 * np.abs(truth).max()
            assert answer(engine) == tokens
            used, model = engine.model.kernels.used, engine.model
            assert {m.mode for m in model.modules() if hasattr(m, "mode")} == {s.mode for s in SPLIT_KINDS.values()}
        assert (mode == "reference") == (not used)
        assert mode == "reference" or {"qmv", "embed_rows", "concat_columns"} <= used.keys()
    held = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    checkpoint = GgufCheckpoint(file)
    assert held <= MOST_MEMORY * sum(info.nbytes for info in checkpoint.sizes().values())
    assert held == checkpoint_bytes(checkpoint, mx.float32, False, on_gpu=True)


def test_experts_are_computed_from_split_stacks(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"shared_expert_intermediate_size": 256, "max_window_layers": 2}
    folder = write_qwen2_moe(tmp_path / "moe", **sizes)
    packed, plain = write_pair(folder, tmp_path / "moe.gguf", ["q4_k"])
    with mlxrt.load(str(plain), dtype="float32") as engine:
        truth, tokens = np.array(engine.score([3, 5])), answer(engine, (7, 9), 2)
    with open_split(packed, "strict") as engine:
        found, used = np.array(engine.score([3, 5])), engine.model.kernels.used
        assert np.abs(found - truth).max() < 1e-4 * np.abs(truth).max()
        assert answer(engine, (7, 9), 2) == tokens and {"moe_router_gate_up", "moe_down"} <= used.keys()


@pytest.mark.parametrize("name", ["gemma4_e2b", "gemma4_moe", "qwen3_5_moe", "qwen3_next"])
def test_architectures_with_stacks_and_moved_rows_are_split(name, tmp_path):
    """Some of their rows hold a block of IQ4_NL at least."""
    [row] = [row for row in list_rows() if str(row) == name]
    row.make_checkpoint(tmp_path)
    packed, plain = write_pair(tmp_path, tmp_path / "k.gguf", ["iq4_nl"])
    with mlxrt.load(str(plain), dtype="float32") as engine:
        truth = engine.score(list(PROMPT))
    with open_split(packed, "reference") as engine:
        assert mx.allclose(engine.score(list(PROMPT)), truth, rtol=1e-5, atol=1e-4)
        kinds = {type(m) for m in engine.model.modules()}
    assert kinds & {PackedEmbedding, PackedLinear} and (PackedExpertLinear in kinds) == name.startswith("qwen")


@pytest.mark.parametrize("kind", ["q6_k", "iq4_nl"])
def test_many_rows_are_multiplied_by_a_dequantised_matrix(kind):
    mx.random.seed(2)
    matrix = split_matrix(kind, split_blocks(kind, blocks_of(kind, (9, 256))))
    layer, x = PackedLinear(matrix, mx.random.normal((9,))), mx.random.normal((70, 256))
    layer.kernels = Kernels("strict", make_gpu("metal", Simulator().metal_kernel))
    right = x @ matrix.plain().T + layer.bias
    assert mx.allclose(layer(x), right, rtol=1e-5, atol=1e-5) and layer.kernels.used == {"dequantize": 1}
    stack = PackedExpertLinear(split_matrix(kind, split_blocks(kind, blocks_of(kind, (3, 5, 256)))))
    stack.kernels, experts = layer.kernels, mx.array([2, 0, 2, 1])
    right = (stack.matrix.plain()[experts] @ x[:4, :, None]).swapaxes(-1, -2)
    assert mx.allclose(stack(x[:4, None], experts), right, rtol=1e-5, atol=1e-5)


def test_half_precision_is_what_the_file_s_scales_have(files):
    file, folder = files
    with mlxrt.load(str(folder), dtype="float32") as engine:
        truth = np.array(engine.score(list(PROMPT)))
    with open_split(file, "strict", dtype=None) as engine:
        assert engine.model.dtype == mx.float16
        found, used = np.array(engine.score(list(PROMPT))), engine.model.kernels.used
    assert np.abs(found - truth).max() < 2e-2 * np.abs(truth).max()
    assert {"qmm", "embed_rows"} <= used.keys()
