"""NVIDIA's compiler, where its wheels are installed: says whether a kernel's text is CUDA, without a GPU.

    pip install nvidia-cuda-nvrtc nvidia-cuda-runtime

Three mistakes that Metal and the simulator allow reached a GPU before this was here.
"""

import struct
from typing import Any

import mlx.core as mx

from mlxrt.kernels.cuda.nvrtc import compile_cubin, cuda_source

ARCHITECTURE = "sm_90"
REGISTERS = 65536  # of a multiprocessor: a threadgroup that wants more is not launched
COUNT = bytes((0x04, 0x2F, 0x08, 0x00))  # stands before a function's number and its registers


def complaints(text: str, threads: int = 32) -> str:
    """What the compiler says against a text, or would be said at its launch; nothing if it runs."""
    try:
        code = compile_cubin(text, ARCHITECTURE)
    except RuntimeError as said:
        return str(said)
    wanted = -(-registers(code) // 8) * 8 * threads
    return f"{threads} threads want {wanted} registers" if wanted > REGISTERS else ""


def registers(code: bytes) -> int:
    """Of a thread, as the code's own notes have it."""
    at = code.index(COUNT) + len(COUNT)
    return struct.unpack_from("<II", code, at)[1]


class Compiled:
    """Stands in for mx.fast.cuda_kernel: compiles what would be launched and gives back zeros."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}  # kernel source -> the compiler's complaints

    def __call__(self, name: str, input_names: list[str], output_names: list[str], source: str, header: str) -> Any:
        def launch(*, inputs, grid, threadgroup, output_shapes, output_dtypes, template):
            takes = [(n, a.dtype) for a, n in zip(inputs, input_names, strict=True)]
            gives = list(zip(output_names, output_dtypes, strict=True))
            text = cuda_source(name, takes, gives, source, header, template, threadgroup[0])
            if text not in self.errors:
                self.errors[text] = complaints(text, threadgroup[0])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch
