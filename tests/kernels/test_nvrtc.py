"""Compiled kernels in a folder: found again by the next process, and only by the same text."""

import shutil
import subprocess
from threading import Thread

import mlx.core as mx
import pytest

from mlxrt.kernels import make_gpu
from mlxrt.kernels.cuda import nvrtc as cuda_compiler
from mlxrt.kernels.cuda.module_cache import announce_compiling, hash_bytes, put_module, use_module_folder
from mlxrt.kernels.cuda.nvrtc import Library, compile_cubin, cuda_source, find_nvrtc

from ..support.log_lines import capture_log

needs_nvrtc = pytest.mark.skipif(
    find_nvrtc() is None, reason="NVIDIA's compiler is not here: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"
)
BODY = "y[threadIdx.x] = static_cast<T>(float(x[threadIdx.x]) + float(N));"


class Runs:
    """Stands in for mx.fast.precompiled_cuda_kernel."""

    def __init__(self):
        self.asked = []

    def __call__(self, *, name, compiled_source, inputs, output_shapes, output_dtypes, **rest):
        self.asked.append((name, compiled_source))
        return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes)]


@pytest.fixture(autouse=True)
def own_module_folder(monkeypatch, tmp_path):
    """The environment variable is the process's: every test has its own."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "modules"))


def launch(library, n=3, dtype=mx.float16, source=BODY):
    kernel = library("plus", ["x"], ["y"], source)
    what = {"inputs": [mx.zeros(32, dtype)], "output_shapes": [(32,)], "output_dtypes": [dtype]}
    return kernel(**what, grid=(32, 1, 1), threadgroup=(32, 1, 1), template=[("T", dtype), ("N", n), ("B", True)])


@pytest.fixture
def compiler(monkeypatch):
    """Counts what is compiled, and compiles nothing."""
    sources = []

    def stand_in(text, architecture):
        sources.append(text)
        return f"code of {len(sources)}".encode()

    monkeypatch.setattr(cuda_compiler, "compile_cubin", stand_in)
    return sources


def test_a_text_is_compiled_once_for_all_processes(tmp_path, compiler):
    first, second = Runs(), Runs()
    library = Library(tmp_path, "sm_90", first)
    for _ in range(3):
        launch(library)
    launch(Library(tmp_path, "sm_90", second))
    assert len(compiler) == 1
    assert set(first.asked) == set(second.asked) and len(set(first.asked)) == 1
    assert [p.suffix for p in (tmp_path / "sm_90").iterdir()] == [".cubin"]


@pytest.mark.parametrize("other", [{"n": 4}, {"dtype": mx.bfloat16}, {"source": BODY + " "}])
def test_another_text_is_another_kernel(tmp_path, compiler, other):
    run = Runs()
    library = Library(tmp_path, "sm_90", run)
    launch(library)
    launch(library, **other)
    assert len(compiler) == 2 and len({name for name, _ in run.asked}) == 2


def test_a_kernel_is_launched_by_its_name_where_mlx_finds_its_code(tmp_path, compiler):
    """MLX looks for NAME_HASH.ptx, the hash being that of what it is given to launch, and for its kernels in a .txt."""
    run, folder = Runs(), tmp_path / "modules"
    library = Library(tmp_path, "sm_90", run, modules=folder)
    for _ in range(2):
        with library.recording() as launches:
            launch(library)
    [(name, given)] = set(run.asked)
    assert given == b"mlxrt" and launches[0].code == b"code of 1"
    stem = f"{name}_{hash_bytes(given):x}"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        f"{stem}.ptx": b"code of 1",
        f"{stem}.txt": f"{name}\t{name}\n".encode(),
    }
    (folder / f"{stem}.ptx").write_bytes(b"co")  # damaged
    launch(Library(tmp_path, "sm_90", run, modules=folder))
    assert (folder / f"{stem}.ptx").read_bytes() == b"code of 1"


def test_modules_that_were_cut_off_are_compiled_anew(tmp_path):
    """MLX writes NAME.ptx, NAME.txt, NAME.cu in this order, and takes a .ptx alone for a module without kernels."""
    folder = tmp_path / "modules"
    files = {
        "whole": (b"code", b"f\tf\n", b"text"),
        "x" * 245 + "/whole": (b"code", b"f\tf\n", b"text"),  # long names are folders
        "empty": (b"", None, None),
        "without_names": (b"code", None, None),
        "y" * 245 + "/without_names": (b"code", None, None),
        "full_disk": (b"co", b"", b""),
        "full_disk_later": (b"code", b"f\tf\n", b""),
        "without_code": (None, b"f\tf\n", b"text"),
    }
    for name, contents in files.items():
        for suffix, content in zip((".ptx", ".txt", ".cu"), contents):
            path = folder / (name + suffix)
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content)
    put_module(folder, "ours", b"code")
    said = capture_log("5 compiled modules")
    assert use_module_folder(tmp_path, "sm_90") == folder
    left = sorted(str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.ptx"))
    assert left == ["ours_" + f"{hash_bytes(b'mlxrt'):x}", "whole", "x" * 245 + "/whole"]
    assert len(said) == 1
    use_module_folder(tmp_path, "sm_90")
    assert len(said) == 1


def test_a_folder_that_is_not_there_has_nothing_to_remove(tmp_path):
    assert use_module_folder(tmp_path, "sm_90") == tmp_path / "modules" and not (tmp_path / "modules").exists()


def test_a_machine_where_mlx_has_compiled_nothing_is_told_that_first_prompts_take_long(tmp_path):
    said = capture_log("MLX compiles its CUDA kernels")
    announce_compiling(tmp_path / "none")
    put_module(tmp_path, "ours", b"code")
    announce_compiling(tmp_path)
    assert len(said) == 2
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "gather.cu").write_bytes(b"text")
    announce_compiling(tmp_path)
    assert len(said) == 2


def test_where_modules_cannot_be_stored_kernels_carry_their_code(tmp_path, compiler):
    (tmp_path / "file").write_text("")
    run, said = Runs(), capture_log("cannot keep")
    launch(Library(tmp_path, "sm_90", run, modules=tmp_path / "file"))
    assert [given for _, given in run.asked] == [b"code of 1"] and len(said) == 1


def test_the_hash_is_that_of_the_c_library(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    texts = [b"", b"a", b"mlxrt", b"12345678", b"123456789", bytes(range(1, 100))]
    lines = [f'"{"".join(f"{chr(92)}x{b:02x}" for b in text)}"' for text in texts]
    source = tmp_path / "hash.cpp"
    source.write_text(
        "#include <cstdio>\n#include <functional>\n#include <string>\nint main() {\n"
        + "\n".join(f'printf("%zx\\n", std::hash<std::string>{{}}(std::string({line})));' for line in lines)
        + "\n}\n"
    )
    subprocess.run([compiler, str(source), "-o", str(tmp_path / "hash")], check=True)
    said = subprocess.run([str(tmp_path / "hash")], check=True, capture_output=True, text=True).stdout
    assert [f"{hash_bytes(text):x}" for text in texts] == said.split()


def test_where_mlx_does_not_find_modules_kernels_carry_their_code(tmp_path, monkeypatch, compiler):
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    monkeypatch.setattr(cuda_compiler, "find_nvrtc", lambda: ("there", tmp_path))
    said = capture_log()
    for finds in (False, True):

        def run(*, inputs, compiled_source, finds=finds, **rest):
            if compiled_source == b"mlxrt" and not finds:
                raise RuntimeError("Failed to load compiled mlxrt_trial kernel: .")
            return [inputs[0] + 3]

        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", run)
        assert (cuda_compiler.library(tmp_path).modules is not None) == finds
    assert len(said) == 1 and said[0].startswith("MLX goes through the code of a kernel at every launch")


def test_another_device_has_a_folder_of_its_own(tmp_path, compiler):
    for architecture in ("sm_90", "sm_100"):
        launch(Library(tmp_path, architecture, Runs()))
    assert len(compiler) == 2


def test_the_name_in_the_text_is_the_name_that_is_launched(tmp_path, compiler):
    run = Runs()
    launch(Library(tmp_path, "sm_90", run))
    [(name, _)] = run.asked
    assert f'extern "C" __global__ void __launch_bounds__(32, 1) {name}(const __half* x, __half* y)' in compiler[0]
    assert "constexpr bool B = true;" in compiler[0] and "using T = __half;" in compiler[0]


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, compiler):
    (tmp_path / "file").write_text("")
    run, said = Runs(), capture_log()
    library = Library(tmp_path / "file", "sm_90", run)
    for n in (3, 4):
        launch(library, n)
    assert len(run.asked) == 2
    assert len(said) == 1 and said[0].startswith("cannot keep compiled kernels in ")


def test_where_compiled_kernels_do_not_run_mlx_compiles(tmp_path, monkeypatch):
    """No GPU here: the trial raises, and mx.fast.cuda_kernel is taken."""
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    monkeypatch.setattr(cuda_compiler, "find_nvrtc", lambda: ("there", tmp_path))
    monkeypatch.setattr(cuda_compiler, "compile_cubin", lambda text, architecture: b"code")
    said = capture_log()
    assert make_gpu("cuda", folder=tmp_path)._make is mx.fast.cuda_kernel
    assert len(said) == 1 and said[0].startswith("MLX compiles kernels anew in every process: ")


def test_a_wrong_trial_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    monkeypatch.setattr(cuda_compiler, "find_nvrtc", lambda: ("there", tmp_path))
    monkeypatch.setattr(cuda_compiler, "compile_cubin", lambda text, architecture: b"code")
    for right in (False, True):

        def run(*, inputs, right=right, **rest):
            return [inputs[0] + (3 if right else 2)]

        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", run)
        assert (cuda_compiler.library(tmp_path) is not None) == right


@needs_nvrtc
def test_the_compiler_makes_machine_code():
    text = cuda_source("plus", [("x", mx.bfloat16)], [("y", mx.bfloat16)], BODY, "", [("T", mx.bfloat16), ("N", 3)], 32)
    code = compile_cubin(text, "sm_90")
    assert code.startswith(b"\x7fELF") and b"plus" in code
    with pytest.raises(RuntimeError, match="identifier"):
        compile_cubin(text.replace("threadIdx", "noSuchThing"), "sm_90")


def test_what_a_thread_launches_is_recorded_for_it_alone(tmp_path, compiler):
    library = Library(tmp_path, "sm_90", Runs())
    launch(library)
    with library.recording() as launches:
        [mine] = launch(library, n=5)
        other = Thread(target=launch, args=(library,))
        other.start()
        other.join()
    launch(library)
    [one] = launches
    assert one.outputs[0] is mine and one.blocks == (1, 1, 1) and one.threads == (32, 1, 1)
    assert one.name.startswith("plus_") and one.code.startswith(b"code of ")
