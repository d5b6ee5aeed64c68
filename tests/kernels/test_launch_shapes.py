"""Launch shapes: on the device they were measured on they stay what was measured; other devices get their share."""

from types import SimpleNamespace

import pytest

from mlxrt.kernels import DeviceProfile, backend, make_gpu
from mlxrt.kernels.device import APPLE_CORES, profile
from mlxrt.kernels.ops import moe_fused, moe_grouped, moe_qmv, paged_attention, qmm, qmv
from mlxrt.kernels.ops.attention_layout import QKVLayout

from ..support.log_lines import capture_log

H200 = DeviceProfile(132, 49152)
QMV = [  # rows, width, quantized, rows of x, pair -> simdgroups, rows at once, loops, tile, threadgroups of a core
    ((40, 128, True, 1, False), (8, 1, 1, 1024, 1)),
    ((2048, 2048, True, 1, False), (8, 2, 1, 2048, 1)),
    ((4096, 4096, True, 1, False), (8, 2, 1, 4096, 1)),
    ((6144, 4096, True, 1, False), (8, 2, 1, 4096, 1)),
    ((12288, 4096, True, 2, False), (8, 1, 1, 2048, 1)),
    ((24576, 4096, True, 1, True), (8, 2, 3, 4096, 2)),
    ((24576, 4096, True, 4, True), (8, 1, 1, 1024, 2)),
    ((151936, 4096, True, 1, False), (8, 4, 18, 4096, 2)),
    ((151936, 2048, True, 3, False), (8, 1, 1, 1024, 2)),
    ((16384, 1024, True, 1, False), (8, 4, 2, 1024, 2)),
    ((4096, 4096, False, 1, False), (8, 1, 1, 4096, 1)),
    ((151936, 1024, False, 2, False), (8, 1, 38, 1024, 1)),
    ((262144, 2560, True, 1, False), (8, 4, 32, 3072, 2)),
]
QMM = [  # rows, width, tiles of x, memory, in pairs -> tiles of x together, of rows; groups, splits, resident
    ((2048, 4096, 1, 49152, True), (1, 2, 1, 8, 1)),
    ((2048, 4096, 1, 32768, False), (1, 2, 1, 8, 1)),
    ((5120, 2048, 4, 49152, True), (4, 2, 4, 2, 1)),
    ((6144, 4096, 4, 49152, False), (4, 2, 4, 2, 1)),
    ((12288, 4096, 4, 49152, True), (4, 2, 2, 2, 1)),
    ((24576, 4096, 4, 49152, True), (4, 2, 4, 1, 1)),
    ((4096, 12288, 4, 49152, True), (4, 2, 2, 4, 1)),
    ((4096, 4096, 8, 49152, True), (4, 2, 4, 2, 1)),
    ((6144, 4096, 8, 49152, True), (4, 2, 2, 2, 1)),
    ((2048, 4096, 8, 49152, True), (4, 2, 1, 4, 1)),
    ((12288, 4096, 1, 49152, True), (1, 4, 1, 4, 1)),
    ((12288, 4096, 1, 49152, False), (1, 2, 2, 2, 1)),
    ((24576, 4096, 1, 49152, True), (1, 4, 2, 2, 4)),
    ((24576, 128, 1, 49152, True), (1, 4, 2, 1, 4)),
    ((151936, 4096, 2, 49152, True), (2, 4, 2, 2, 4)),
    ((151936, 4096, 2, 49152, False), (2, 2, 2, 2, 1)),
    ((40, 256, 1, 32768, True), (1, 2, 2, 2, 1)),
    ((4096, 8192, 2, 32768, True), (2, 2, 2, 4, 1)),
    ((1024, 1024, 2, 32768, True), (2, 2, 1, 4, 1)),
    ((12288, 4096, 8, 49152, True), (4, 4, 2, 2, 3)),
    ((24576, 4096, 8, 49152, True), (4, 4, 4, 1, 1)),
    ((24576, 4096, 8, 32768, False), (8, 4, 4, 1, 1)),
    ((151936, 2048, 8, 49152, True), (8, 4, 4, 1, 1)),
]
GROUPED = [  # pairs to an expert, width, unpacked in pairs -> as above
    ((2, 2048, True), (1, 4, 2, 2, 4)),
    ((2, 768, True), (1, 2, 4, 1, 6)),
    ((2, 768, False), (1, 2, 4, 2, 1)),
    ((8, 2048, True), (2, 2, 4, 2, 3)),
    ((32, 2048, True), (8, 4, 4, 1, 1)),
    ((32, 768, True), (4, 4, 4, 1, 1)),
    ((32, 768, False), (4, 2, 4, 1, 1)),
]
MOE_DOWN = [  # rows, bits, quantized -> rows of a simdgroup
    ((9, 4, True), 1),
    ((512, 4, True), 2),
    ((1024, 4, True), 4),
    ((2048, 4, True), 4),
    ((2048, 8, True), 2),
    ((4096, 2, True), 4),
    ((2048, 16, False), 1),
]
MOE_ROUTER_GATE_UP = [  # hidden, tokens times k, bits -> rows at once, loops
    ((24, 4, 4), (1, 1)),
    ((768, 8, 4), (3, 1)),
    ((2880, 4, 4), (3, 2)),
    ((1024, 8, 8), (1, 4)),
    ((1536, 8, 4), (3, 2)),
    ((290, 3, 3), (1, 1)),
]
ATTENTION = [  # rows, heads, KV heads, dim, tokens -> (heads together, simdgroups, splits, resident) of
    # simd plain, simd quantized, tiled plain, tiled quantized
    ((1, 16, 8, 128, 512), [(1, 16, 1, 1), (1, 8, 1, 1), (1, 12, 1, 1), (1, 12, 1, 1)]),
    ((1, 16, 8, 128, 2048), [(1, 16, 4, 1), (1, 8, 4, 1), (1, 12, 4, 1), (1, 12, 4, 1)]),
    ((1, 32, 8, 128, 1024), [(1, 16, 1, 1), (1, 8, 1, 1), (1, 12, 1, 1), (1, 12, 1, 1)]),
    ((1, 32, 8, 128, 32768), [(4, 8, 16, 1), (4, 8, 16, 1), (4, 10, 16, 1), (4, 8, 32, 2)]),
    ((8, 32, 8, 128, 32768), [(4, 8, 2, 1), (4, 8, 2, 1), (4, 10, 2, 1), (4, 8, 4, 2)]),
    ((8, 16, 8, 128, 512), [(1, 16, 1, 1), (1, 8, 1, 1), (1, 12, 1, 1), (1, 12, 1, 1)]),
    ((64, 32, 8, 128, 2048), [(4, 8, 1, 1), (4, 8, 1, 1), (4, 8, 1, 2), (4, 8, 1, 2)]),
    ((1, 16, 8, 256, 544), [(1, 8, 4, 1)] * 4),
    ((8, 8, 1, 256, 544), [(2, 8, 4, 1)] * 4),
    ((1, 8, 4, 256, 4096), [(1, 8, 8, 1), (1, 8, 8, 1), (1, 8, 8, 1), (1, 8, 8, 1)]),
    ((16, 8, 4, 256, 8192), [(2, 8, 2, 1), (2, 8, 2, 1), (2, 8, 2, 1), (2, 8, 4, 1)]),
    ((4, 16, 1, 512, 2048), [(2, 5, 4, 1), (2, 5, 4, 1), (2, 5, 4, 1), (2, 5, 4, 1)]),
    ((32, 64, 8, 64, 131072), [(8, 8, 1, 1), (8, 8, 1, 1), (8, 8, 1, 2), (8, 8, 1, 2)]),
    ((1, 64, 8, 64, 131072), [(8, 8, 16, 1), (8, 8, 16, 1), (8, 10, 16, 1), (8, 8, 32, 2)]),
]
PARTIAL_ATTENTION = [  # rows, heads, KV heads, dim, tokens -> the same, where splits need no launch of their own
    ((1, 16, 8, 128, 256), (1, 16, 1, 1)),
    ((1, 16, 8, 128, 512), (1, 16, 4, 1)),
    ((1, 16, 8, 128, 1024), (1, 16, 4, 1)),
    ((1, 16, 8, 128, 2048), (1, 12, 4, 1)),
    ((2, 32, 8, 128, 1024), (1, 16, 2, 1)),
    ((1, 32, 4, 128, 1024), (1, 16, 4, 1)),
    ((1, 32, 4, 128, 4096), (2, 12, 8, 1)),
    ((1, 64, 8, 64, 1024), (2, 8, 4, 1)),
    ((1, 128, 8, 128, 1024), (1, 16, 1, 1)),
]
QKV_ATTENTION = [  # heads, KV heads, dim, quantized -> the same, of one short row
    ((16, 8, 128, False), (1, 16, 1, 1)),
    ((16, 8, 128, True), (1, 8, 1, 1)),
    ((32, 4, 128, False), (1, 16, 1, 1)),
    ((8, 4, 256, False), (1, 16, 1, 1)),
    ((8, 4, 256, True), (1, 8, 1, 1)),
]


def matrix(rows: int, width: int, bits: int = 4, packed: bool = True, is_k_quant: bool = False):
    return SimpleNamespace(rows=rows, width=width, bits=bits, packed=packed, is_k_quant=is_k_quant)


@pytest.mark.parametrize(("shape", "chosen"), QMV)
def test_qmv(shape, chosen):
    rows, width, packed, m, pair = shape
    outputs = rows // 2 if pair else rows
    assert tuple(qmv.tile_config(H200, outputs, matrix(rows, width, packed=packed), m, pair).values()) == chosen


def test_three_threadgroups_of_a_k_quant_are_resident():
    for rows, resident in ((1024, 3), (12288, 3), (24576, 2)):
        assert qmv.tile_config(H200, rows, matrix(rows, 4096, is_k_quant=True), 1, False)["RESIDENT"] == resident


@pytest.mark.parametrize(("shape", "chosen"), QMM)
def test_qmm(shape, chosen):
    rows, width, tiles, memory, paired = shape
    assert tuple(qmm.tile_config(DeviceProfile(132, memory), rows, width, tiles, paired).values()) == chosen


@pytest.mark.parametrize(("shape", "chosen"), GROUPED)
def test_moe_grouped(shape, chosen):
    assert tuple(moe_grouped.grouped_config(*shape).values()) == chosen


@pytest.mark.parametrize(("shape", "chosen"), MOE_DOWN)
def test_moe_down(shape, chosen):
    rows, bits, packed = shape
    assert moe_qmv.rows_per_simdgroup(H200, rows, matrix(rows, 1024, bits, packed)) == chosen


@pytest.mark.parametrize(("shape", "chosen"), MOE_ROUTER_GATE_UP)
def test_moe_router_gate_up(shape, chosen):
    hidden, pairs, bits = shape
    assert moe_fused.launch_config(H200, hidden * pairs, matrix(hidden, 1024, bits)) == chosen


@pytest.mark.parametrize(("shape", "chosen"), ATTENTION)
def test_attention(shape, chosen):
    rows, *heads, tokens = shape
    layout, kinds = QKVLayout(*heads), [(tiled, quantized) for tiled in (False, True) for quantized in (False, True)]
    configs = [
        paged_attention.launch_config(H200, rows, layout, tokens, tiled=tiled, quantized=quantized)
        for tiled, quantized in kinds
    ]
    assert configs == chosen


@pytest.mark.parametrize(("shape", "chosen"), PARTIAL_ATTENTION)
def test_attention_whose_splits_the_output_projection_combines(shape, chosen):
    rows, *heads, tokens = shape
    layout, kind = QKVLayout(*heads), {"tiled": tokens > 1024, "quantized": False, "partial": True}
    assert paged_attention.launch_config(H200, rows, layout, tokens, **kind) == chosen


@pytest.mark.parametrize(("shape", "chosen"), QKV_ATTENTION)
@pytest.mark.parametrize("tokens", [300, 1024])
def test_qkv_attention(shape, chosen, tokens):
    *heads, quantized = shape
    sizes = {"tiled": False, "quantized": quantized, "fused": True}
    assert paged_attention.launch_config(H200, 1, QKVLayout(*heads), tokens, **sizes) == chosen


def test_a_smaller_device_has_fewer_threadgroups():
    small = DeviceProfile(10)
    assert [H200.scale(n) for n in (128, 264, 512)] == [128, 264, 512]
    assert small.scale(264) == 20 and small.scale(1) == 1
    assert qmv.tile_config(small, 4096, matrix(4096, 2048), 1, False)["LOOPS"] > 1
    layout, kind = QKVLayout(32, 8, 128), {"tiled": True, "quantized": False}
    large, few = (paged_attention.launch_config(device, 1, layout, 32768, **kind) for device in (H200, small))
    assert few.splits < large.splits and few.heads == large.heads == 4


@pytest.mark.skipif(backend() != "cpu", reason="this machine has a GPU")
def test_simulated_kernels_have_the_shapes_that_were_measured():
    assert profile("metal") == DeviceProfile(132, 32768) and profile("cuda") == H200
    assert make_gpu("metal").profile.cores == 132


@pytest.mark.parametrize(("architecture", "cores"), [("applegpu_g13g", 10), ("applegpu_g16s", 40), ("other", 132)])
def test_apple_devices_are_known_by_their_architecture(monkeypatch, architecture, cores):
    monkeypatch.setattr("mlxrt.kernels.device.backend", lambda: "metal")
    monkeypatch.setattr("mlx.core.device_info", lambda: {"architecture": architecture})
    lines = capture_log()
    assert profile("metal") == DeviceProfile(cores, 32768)
    assert len(lines) == (architecture == "other")
    assert sorted(APPLE_CORES) == ["d", "g", "p", "s"]


def test_a_driver_that_does_not_answer_is_logged(monkeypatch):
    def no_driver(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("mlxrt.kernels.device.backend", lambda: "cuda")
    monkeypatch.setattr("ctypes.CDLL", no_driver)
    lines = capture_log()
    assert profile("cuda") == H200
    assert len(lines) == 1 and "libcuda.so.1" in lines[0]
