"""NVIDIA's compiler, where its wheels are installed: says whether a kernel's text is CUDA, without a GPU.

    pip install nvidia-cuda-nvrtc nvidia-cuda-runtime

Three mistakes that Metal and the simulator allow reached a GPU before this was here.
"""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

TYPES = {
    mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float", mx.uint32: "unsigned int",
    mx.int32: "int", mx.uint8: "unsigned char", mx.int8: "signed char", mx.uint16: "unsigned short",
    mx.int16: "short", mx.int64: "long long", mx.bool_: "bool",
}  # fmt: skip
ARCHITECTURE = "sm_90"
INCLUDES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"


@cache
def library() -> tuple[ctypes.CDLL, Path] | None:
    """The compiler and its headers; None where the wheels are not there."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for path in sorted(Path(folder).rglob("libnvrtc.so.*")):
            headers = list(Path(folder).rglob("cuda_fp16.h"))
            if "builtins" not in path.name and headers:
                return ctypes.CDLL(str(path)), headers[0].parent
    return None


def complaints(text: str) -> str:
    """What the compiler says against a text; nothing if it compiles."""
    there = library()
    assert there is not None
    nvrtc, headers = there
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        options = [
            f"--gpu-architecture={ARCHITECTURE}".encode(),
            f"-I{headers}".encode(),
            b"--std=c++17",
            b"-default-device",
        ]
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.value.decode() if failed else ""
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class Compiled:
    """Stands in for mx.fast.cuda_kernel: compiles what would be launched and gives back zeros."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # text -> what was said against it

    def __call__(self, name: str, input_names: list[str], output_names: list[str], source: str, header: str) -> Any:
        def launch(*, inputs, grid, threadgroup, output_shapes, output_dtypes, template):
            constants = [
                f"using {key} = {TYPES[value]};"
                if isinstance(value, mx.Dtype)
                else f"constexpr {'bool' if isinstance(value, bool) else 'int'} {key} = {str(value).lower()};"
                for key, value in template
            ]
            takes = [f"const {TYPES[a.dtype]}* {n}" for a, n in zip(inputs, input_names, strict=True)]
            takes += [f"{TYPES[d]}* {n}" for d, n in zip(output_dtypes, output_names, strict=True)]
            body = "\n".join([*constants, source])
            text = f"{INCLUDES}{header}\n__global__ void {name}({', '.join(takes)}) {{\n{body}\n}}\n"
            if text not in self.texts:
                self.texts[text] = complaints(text)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch
