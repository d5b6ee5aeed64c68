"""GGUF files of random K-quants for any architecture, each beside a file of the same numbers in F32."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxrt.kernels.ops.k_quants import block_shape, dequantize_blocks
from mlxrt.kernels.testing import sample_blocks

from .llama_cpp_files import convert


def write_pair(folder: Path, path: Path, kinds: Sequence[str]) -> tuple[Path, Path]:
    """The model of a folder with other weights: matrices take turns with `kinds`, those too narrow for one stay F32."""
    numbers: dict[str, np.ndarray] = {}

    def encode(name: str, array: np.ndarray) -> tuple[np.ndarray, str]:
        kind = kinds[len(numbers) % len(kinds)]
        if array.shape[-1] % block_shape(kind)[1]:
            return array, "F32"
        blocks, numbers[name] = random_blocks(kind, array, seed=len(numbers))
        return blocks, kind.upper()

    packed = convert(folder, path.with_suffix(".packed.gguf"), encode=encode)
    plain = convert(folder, path.with_suffix(".plain.gguf"), encode=lambda name, a: (numbers.get(name, a), "F32"))
    return packed, plain


def random_blocks(kind: str, like: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of a matrix, or stack, whose numbers are about as large as those of another; and these numbers."""
    (nbytes, elements), size = block_shape(kind), 1e-3
    for _ in range(2):  # the first to see how large they become
        mx.random.seed(seed)
        blocks = sample_blocks(kind, like.shape, size, nbytes, elements)
        values = np.array(dequantize_blocks(blocks.reshape(-1, blocks.shape[-1]), kind)).reshape(like.shape)
        size *= float(like.std() / values.std())
    return np.array(blocks), values
