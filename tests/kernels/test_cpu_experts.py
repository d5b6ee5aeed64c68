"""Stacks of packed matrices by the kernels in C: experts of models on a CPU."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlxrt
from mlxrt.kernels import Kernels, QuantizedMatrix
from mlxrt.kernels.cpu.library import CpuKernels
from mlxrt.kernels.ops.k_quants import INTERLEAVED, K_QUANTS
from mlxrt.kernels.testing import sample
from mlxrt.models.quantized.packed_linear import PackedExpertLinear
from mlxrt.weights import GgufCheckpoint

from ..support.k_quant_files import write_pair
from ..support.kernels.cpu_library import compiled_library
from ..support.parity import list_rows
from ..support.qwen2_moe_folder import write_qwen2_moe

# One worker compiles the library, if it is not there yet.
pytestmark = pytest.mark.xdist_group("cpu_kernels")

PROMPT = (3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9)


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(compiled_library(), threads=2)


def as_float16(matrix: QuantizedMatrix) -> QuantizedMatrix:
    parts = matrix.scales.astype(mx.float16), matrix.biases.astype(mx.float16)
    return QuantizedMatrix(matrix.weight, *parts, matrix.bits, matrix.group, matrix.mode)


def make_stack(cpu, mode: str, bits: int) -> QuantizedMatrix:
    mx.random.seed(bits)
    matrix = sample(mode, (5, 64, 512), mx.float32, bits, 64)
    return as_float16(matrix) if mode == "affine" and bits == 4 else matrix.interleave(cpu.rows_together(mode))


@pytest.mark.parametrize(("mode", "bits"), [("affine", 4), ("affine", 6), *((mode, 0) for mode in K_QUANTS)])
def test_stacks_are_multiplied_as_float64_does(cpu, mode, bits):
    matrix = make_stack(cpu, mode, bits)
    layer = PackedExpertLinear(matrix, mx.random.normal((5, 64)))
    layer.kernels = Kernels("auto", cpu=cpu)
    dense, bias = np.array(matrix.plain(), np.float64), np.array(layer.bias, np.float64)
    x = mx.random.normal((40, 512))
    experts = mx.random.randint(0, 4, (40, 3)).astype(mx.uint32)  # nobody chooses the last one
    truth = np.einsum("ni,nkoi->nko", np.array(x, np.float64), dense[np.array(experts)]) + bias[np.array(experts)]
    y = np.array(layer(x[:, None, None], experts))
    assert y.dtype == np.float32 and y.shape == (40, 3, 1, 64)
    assert np.abs(y[:, :, 0] - truth).max() <= 1e-5 * np.abs(truth).max()
    for n in (0, 17, 39):  # a token alone has the same bits
        assert np.array_equal(layer(x[n : n + 1, None, None], experts[n : n + 1])[0], y[n])
    order = mx.argsort(experts.flatten())
    sorted_rows = layer(x[order // 3][:, None], experts.flatten()[order], ordered=True)
    assert np.array_equal(sorted_rows, y.reshape(120, 1, 64)[np.array(order)])
    assert layer.kernels.used == {"moe_sort": 5, "moe_grouped": 5}


def answer(path, **options):
    with mlxrt.load(str(path), dtype="float32", deterministic=True, **options) as engine:
        logits = np.array(engine.score(list(PROMPT)))
        done = engine.generate([list(PROMPT), [7, 9], [4]], max_tokens=12, temperature=0.0, ignore_eos=True)
        modes = {m.mode for m in engine.model.modules() if isinstance(m, PackedExpertLinear)}
        held = sum(a.nbytes for _, a in tree_flatten(engine.model.parameters()))
        return logits, [c.tokens for c in done], modes, held


def test_experts_of_a_file_stay_packed(cpu, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"shared_expert_intermediate_size": 256, "max_window_layers": 2}
    folder = write_qwen2_moe(tmp_path / "moe", **sizes)
    packed, plain = write_pair(folder, tmp_path / "moe.gguf", ["q4_k", "q6_k", "q5_k"])
    truth, tokens, _, _ = answer(plain)
    logits, drawn, modes, held = answer(packed)
    assert modes and all(INTERLEAVED.get(mode, (mode,))[0] in K_QUANTS for mode in modes)
    assert np.abs(logits - truth).max() < 1e-5 * np.abs(truth).max()
    assert drawn == tokens
    assert held <= 1.06 * sum(info.nbytes for info in GgufCheckpoint(packed).sizes().values())


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_1", "iq4_nl"])
def test_short_blocks_of_hybrids_with_experts_stay_packed(cpu, name, kind, tmp_path):
    [row] = [row for row in list_rows() if str(row) == name]
    row.make_checkpoint(tmp_path)
    packed, plain = write_pair(tmp_path, tmp_path / "short.gguf", [kind])
    truth, tokens, _, _ = answer(plain)
    logits, drawn, modes, _ = answer(packed)
    assert modes
    assert np.abs(logits - truth).max() < 5e-5 * np.abs(truth).max()
    assert drawn == tokens
