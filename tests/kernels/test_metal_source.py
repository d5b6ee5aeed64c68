"""Kernel sources: every file of kernels/metal is read, used and formatted, and compilers name its lines."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import mlx.core as mx
import pytest

from mlxrt.kernels import OPS, KernelSource, make_gpu, metal_source
from mlxrt.kernels.cuda.nvrtc import find_nvrtc
from mlxrt.kernels.selftest import list_cases

from ..support.kernels.nvrtc import Compiled
from ..support.metal_sim import MetalCompileError, Simulator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "mlxrt" / "kernels" / "metal"
PROBE = KernelSource("probe.metal", ("x",), ("y",))
FILES = {
    "metal/probe.metal": '#include "one.h"\n#include "two.h"\nFN float last(float x) {\n    return two(x);\n}\n\n'
    "[[kernel]] void mlxrt_probe(MLX_ARGUMENTS) {\n    uint i = thread_position_in_threadgroup.x;\n"
    "    y[i] = last(x[i]);\n}\n",
    "metal/one.h": "FN float one(float x) {\n    return x;\n}\n",
    "metal/two.h": '#include "one.h"\nFN float two(float x) {\n    return one(x) + one(x);\n}\n',
}


@pytest.fixture
def files(monkeypatch):
    """The probe's files beside the real ones; a test may change them."""
    made, read = dict(FILES), metal_source.read
    monkeypatch.setattr(metal_source, "read", lambda path: made[path] if path in made else read(path))
    metal_source.load.cache_clear()
    yield made
    metal_source.load.cache_clear()


def launch(gpu):
    return gpu(PROBE, [mx.arange(32).astype(mx.float32)], 1, 32, [((32,), mx.float32)])[0]


def test_includes_are_put_in_once_and_lines_keep_their_numbers(files):
    text = metal_source.load("probe.metal")
    assert text.helpers.count("float one(") == 1 and "#include" not in text.helpers
    for part, path in (
        (text.helpers, "metal/probe.metal"),
        (text.body, "metal/probe.metal"),
        (text.helpers, "metal/two.h"),
    ):
        at = path_lines(part)
        wanted = [(n, line) for n, line in enumerate(files[path].splitlines(), 1) if (path, n) in at]
        assert wanted and all(at[path, n] == line for n, line in wanted if "#include" not in line)
    assert mx.array_equal(launch(make_gpu("metal", Simulator().metal_kernel)), 2 * mx.arange(32))


def path_lines(text: str) -> dict[tuple[str, int], str]:
    """What a compiler takes each line for."""
    found, path, number = {}, "", 0
    for line in text.splitlines():
        if directive := re.fullmatch(r'#line (\d+) "mlxrt/kernels/(.*)"', line):
            path, number = directive[2], int(directive[1])
            continue
        found[path, number] = line
        number += 1
    return found


PLANTED = [
    ("metal/probe.metal", "y[i] = last", "y[i] = lost", "probe.metal:9"),
    ("metal/two.h", "return one(x) +", "return nine(x) +", "two.h:3"),
]


@pytest.mark.parametrize(("path", "old", "new", "named"), PLANTED)
def test_an_error_names_the_file_and_line(files, path, old, new, named):
    assert old in files[path]
    files[path] = files[path].replace(old, new)
    with pytest.raises(MetalCompileError, match=f"mlxrt/kernels/metal/{named}"):
        launch(make_gpu("metal", Simulator().metal_kernel))


@pytest.mark.skipif(find_nvrtc() is None, reason="NVIDIA's compiler is not here")
@pytest.mark.parametrize(("path", "old", "new", "named"), PLANTED)
def test_nvidia_s_compiler_names_them_too(files, path, old, new, named):
    files[path] = files[path].replace(old, new)
    compiled = Compiled()
    launch(make_gpu("cuda", compiled))
    [complaint] = compiled.errors.values()
    assert f"mlxrt/kernels/metal/{named.replace(':', '(')})" in complaint


def test_a_file_without_a_kernel_is_refused(files):
    files["metal/probe.metal"] = files["metal/one.h"]
    with pytest.raises(ValueError, match=r"probe\.metal has no"):
        metal_source.load("probe.metal")


def test_every_file_is_used_and_every_name_is_its_own():
    sources = {s.name: s for op in OPS.values() for s in op.sources}
    assert len({id(s) for op in OPS.values() for s in op.sources}) == len(sources)
    used = {f"metal/{s.file}" for s in sources.values() if isinstance(s, KernelSource)} | {"metal/shim.h"}
    for s in sources.values():
        used |= set(re.findall(r'#line 1 "mlxrt/kernels/(metal/\w+\.h)"', s.helpers + s.body))
    assert {f"metal/{p.name}" for p in FOLDER.iterdir()} == used


def test_a_variant_is_another_kernel():
    [source] = OPS["add_norm_qmv"].sources
    assert source.name == "mlxrt_qmv_add_norm" and source.helpers.startswith("#define ADD_NORM 1\n")
    case = list_cases(OPS["add_norm_qmv"], "float32")[0]
    sim = Simulator(portable=True)
    OPS["add_norm_qmv"].launch(make_gpu("metal", sim.metal_kernel), **case.arguments())
    assert "custom_kernel_mlxrt_qmv_add_norm" in sim.launches[0].text


def test_a_wheel_holds_them():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    held = {p for pattern in data["mlxrt"] for p in (ROOT / "mlxrt").glob(pattern)}
    assert {*FOLDER.iterdir(), *(ROOT / "mlxrt/kernels/cuda").glob("*.h")} <= held


@pytest.mark.skipif(shutil.which("clang-format") is None, reason="clang-format is not here: pip install clang-format")
def test_they_are_formatted():
    files = [*FOLDER.iterdir(), ROOT / "mlxrt/kernels/cuda/shim.h"]
    for file in files:
        command = ["clang-format", f"--style=file:{ROOT / '.clang-format'}", "--assume-filename=kernel.cpp"]
        text = file.read_text(encoding="utf-8")
        assert subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout == text, file.name
