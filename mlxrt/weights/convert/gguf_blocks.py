"""Tensors as the bytes of a GGUF type, a part at a time: K-quants by our encoders, the others by PyPI's gguf."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ...errors import BadCheckpoint, quote
from ..formats.gguf.writer import BLOCK_SIZES
from .k_quants import ENCODERS

PART = 1 << 16  # weights that a thread encodes at once: its temporaries fit a core's cache
SLICE = 1 << 24  # weights that are float32 at once
LARGEST_HALF = 65504.0  # of float16, which the scales of all packed types are
WIDE = ("F32", "BF16")  # types with the range of float32


def slice_rows(rows: int, width: int) -> list[slice]:
    """Parts of a tensor [rows, ...] with `width` weights in a row, none of which takes much memory as float32."""
    each = max(1, SLICE // width)
    return [slice(start, start + each) for start in range(0, rows, each)]


def encode(name: str, values: np.ndarray, ggml_type: str) -> Iterator[np.ndarray]:
    """The bytes of a float32 tensor, in order. numpy computes outside of Python's lock, so that threads help."""
    block = BLOCK_SIZES[ggml_type][0]
    flat = values.reshape(-1, block)
    check_range(name, values, ggml_type)
    each, workers = max(1, PART // block), os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[np.ndarray]] = deque()
        for start in range(0, len(flat), each):
            waiting.append(pool.submit(encode_blocks, flat[start : start + each], ggml_type))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def encode_blocks(blocks: np.ndarray, ggml_type: str) -> np.ndarray:
    """float32 [n, block] as a file has them."""
    if ggml_type in ENCODERS:
        return ENCODERS[ggml_type](blocks)
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(blocks.reshape(1, -1), GGMLQuantizationType[ggml_type])  # of several rows it takes 16 at a time


def check_range(name: str, values: np.ndarray, ggml_type: str) -> None:
    """Refuse NaN and infinities, and what a float16 does not hold."""
    peak = max(float(values.max(initial=0)), -float(values.min(initial=0)))  # NaN, where there is one
    if not np.isfinite(peak):
        raise BadCheckpoint(f"{quote(name)} holds NaN or infinities; it cannot be stored")
    if peak > LARGEST_HALF and ggml_type not in WIDE:
        raise BadCheckpoint(
            f"{quote(name)} holds {peak:.4g}, which {ggml_type} cannot: float16 ends at 65504; give --type bf16 or f32"
        )
