"""The BLAS under MLX on a CPU: a row's product must not depend on how many rows there are."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlxrt import _openblas as blas

WHEEL, DEBIAN = "/x/libopenblaso-r0-d77a1985.3.15.so", "libopenblas.so.0"
AVX2 = {"sse2", "sse4_2", "avx", "avx2", "fma"}
# What a new process says of OpenBLAS's kernels, of what the variable is afterwards, and of its products.
PROGRAM = """
import logging, os, mlxrt
logging.basicConfig(format="%(message)s")
from mlxrt import _openblas
from mlxrt.engine.cpu_kernels import products_depend_on_rows
print(_openblas.running(), os.environ.get("OPENBLAS_CORETYPE"), products_depend_on_rows(), sep="|")
"""


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="CPU only")
@pytest.mark.parametrize(
    "inner, outer", [(576, 1536), (1536, 576), (64, 96), (100, 37), (4096, 512), (14336, 64), (33, 1)]
)
def test_products_are_bit_equal_for_every_number_of_rows(inner, outer):
    if outer % 2 and "Nehalem" in blas.running():
        pytest.skip("these kernels add another way where the number of outputs is odd")
    mx.random.seed(0)
    x, w = mx.random.normal((70, inner)), mx.random.normal((outer, inner))
    whole = x @ w.T
    for n in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64):
        assert mx.array_equal(x[:n] @ w.T, whole[:n]).item(), f"{n} rows differ"


def test_running_names_a_library():
    assert blas.running()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the preload is for Linux")
def test_an_openblas_is_preloaded():
    assert "OpenBLAS" in blas.running()


@pytest.mark.parametrize(
    "library, flags, kernels",
    [
        (WHEEL, AVX2 | blas.AVX512, "SkylakeX"),
        (WHEEL, AVX2 | {"avx512f"}, "Nehalem"),  # a Xeon Phi
        (WHEEL, AVX2, "Nehalem"),
        (WHEEL.replace(".15.", ".30."), AVX2 | blas.AVX512, "Nehalem"),
        (DEBIAN, AVX2 | blas.AVX512, "Nehalem"),  # of any version
        (WHEEL, {"sse2"}, None),
        (WHEEL, set(), None),  # not x86
    ],
)
def test_kernels_are_chosen_that_compute_a_row_alike(library, flags, kernels):
    assert blas.choose_kernels(library, flags) == kernels


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={k: v for k, v in os.environ.items() if k != blas.KERNELS} | environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )


def ask(**environment):
    return run(PROGRAM, **environment).stdout.strip().split("|")


@pytest.mark.skipif("sse4_2" not in blas.processor_flags(), reason="x86 only")
def test_the_choice_is_ours_alone_and_the_users_goes_first():
    running, left, depends = ask()
    assert ("SkylakeX" in running or "Nehalem" in running) and (left, depends) == ("None", "False")
    running, left, depends = ask(OPENBLAS_CORETYPE="Prescott")
    assert "Prescott" in running and (left, depends) == ("Prescott", "True")


@pytest.mark.skipif("sse4_2" not in blas.processor_flags(), reason="x86 only")
@pytest.mark.parametrize("threads, depends", [("1", "False"), ("2", "False"), ("4", "False"), ("3", "True")])
def test_nehalems_kernels_serve_where_outputs_divide_among_threads(threads, depends):
    assert ask(OPENBLAS_CORETYPE="Nehalem", OMP_NUM_THREADS=threads)[2] == depends


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the preload is for Linux")
def test_without_it_products_are_right_and_slow():
    running, _, depends = ask(MLXRT_BLAS="off")
    assert (running, depends) == (blas.OFF, "False")


@pytest.mark.skipif("sse4_2" not in blas.processor_flags(), reason="x86 only")
def test_a_blas_whose_products_depend_on_rows_is_warned_of():
    done = run(PROGRAM + 'mlxrt.load("shape:smollm2-135m@4bit", max_context=64)', OPENBLAS_CORETYPE="Prescott")
    assert done.stderr.count("other last bits with other numbers of rows") == 1
