"""NVIDIA's compiler, where its wheels are installed: says whether a kernel's text is CUDA, without a GPU.

    pip install nvidia-cuda-nvrtc nvidia-cuda-runtime

Three mistakes that Metal and the simulator allow reached a GPU before this was here.
"""

from typing import Any

import mlx.core as mx

from mlxrt.kernels.cuda_compiler import compiled, cuda_text

ARCHITECTURE = "sm_90"


def complaints(text: str) -> str:
    """What the compiler says against a text; nothing if it compiles."""
    try:
        compiled(text, ARCHITECTURE)
    except RuntimeError as said:
        return str(said)
    return ""


class Compiled:
    """Stands in for mx.fast.cuda_kernel: compiles what would be launched and gives back zeros."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # text -> what was said against it

    def __call__(self, name: str, input_names: list[str], output_names: list[str], source: str, header: str) -> Any:
        def launch(*, inputs, grid, threadgroup, output_shapes, output_dtypes, template):
            takes = [(n, a.dtype) for a, n in zip(inputs, input_names, strict=True)]
            gives = list(zip(output_names, output_dtypes, strict=True))
            text = cuda_text(name, takes, gives, source, header, template)
            if text not in self.texts:
                self.texts[text] = complaints(text)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch
