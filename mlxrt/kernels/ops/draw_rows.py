"""What the draw op is told of each row: sampling parameters and token lists, as one row of uint32 numbers.

A row is 16 numbers (metal/draw.h names them), then lists: tokens of the prompt that are penalised, tokens of the output,
tokens with a bias, and their biases. All rows of a batch have the same width, so that few kernels are compiled.
"""

import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

HEADER = struct.Struct("=IfIf4I4f4I")
TOP_K, SHARPNESS, TOP_P, MAX_GAP, SEED_LOW, SEED_HIGH, POSITION, RECENT = range(8)
REPEATED_ABOVE, REPEATED_BELOW, PRESENCE, FREQUENCY, NUM_PROMPT, NUM_OUTPUT, NUM_BIAS = range(8, 15)
LISTS = 16
COLDEST = 1e-20  # a lower temperature would overflow float32; here already, every gap between logits is a certainty
LARGEST = 3.4e38  # in float32
WORD = 2**32 - 1


@dataclass(frozen=True)
class DrawRow:
    """How the token of one row is chosen. Temperature 0: the best one. `position`: which token of its seed it is.

    `prompt` tokens count for the repetition penalty only, `output` tokens for all three. `recent` of the newest output
    tokens are not in `output`: they are still on the device.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    recent: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)  # -inf: never

    def pack(self) -> bytes:
        share = int(self.top_p * 2**32)  # rounded down: 0.3 of ten equal tokens are three
        header = HEADER.pack(
            self.top_k,
            math.log2(math.e) / max(self.temperature, COLDEST) if self.temperature > 0 else 0.0,
            max(share, 1) if share <= WORD else 0,
            -math.log2(self.min_p) if self.min_p > 0 else math.inf,
            self.seed & WORD,
            self.seed >> 32,
            self.position,
            self.recent,
            clamp(1 / self.repetition_penalty),
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            len(self.prompt),
            len(self.output),
            len(self.bias),
            0,
        )
        lists = [array("I", ids).tobytes() for ids in (self.prompt, self.output, self.bias.keys())]
        return b"".join([header, *lists, array("f", map(clamp, self.bias.values())).tobytes()])


@dataclass(frozen=True)
class DrawPlan:
    """What the rows of a batch ask for at most, so that plain MLX computes nothing that no row needs."""

    drawn: bool = True
    top_k: int = 0  # the largest of all rows; 0: no row has one
    sorts: bool = True  # a row has top-p and no top-k: every token may be the last one that stays

    @classmethod
    def of(cls, rows: Iterable[DrawRow], vocab: int) -> "DrawPlan":
        hot = [r for r in rows if r.temperature > 0]
        kept = [min(r.top_k or vocab, vocab) for r in hot if r.top_p < 1 or 0 < r.top_k < vocab]
        largest = max(kept, default=0)
        return cls(bool(hot), 0 if largest == vocab else largest, largest == vocab)


EVERYTHING = DrawPlan()


def clamp(x: float) -> float:
    """Within float32, infinities as they are."""
    return x if math.isinf(x) else min(max(x, -LARGEST), LARGEST)


def pack_rows(rows: Sequence[DrawRow]) -> mx.array:
    """pack_words on the device."""
    return mx.array(pack_words(rows))


def pack_words(rows: Sequence[DrawRow], width: int = 0, least: int = LISTS) -> np.ndarray:
    """uint32 [R, N], with N at least `least`; up to `width`, idle rows that take the best token."""
    packed = [row.pack() for row in rows]
    longest = max(map(len, packed), default=0)
    size = max(1 << (longest - 1).bit_length(), 4 * least)  # a power of two: few shapes
    packed += [b""] * (width - len(rows))
    numbers = np.frombuffer(b"".join(row.ljust(size, b"\0") for row in packed), np.uint32)
    return numbers.reshape(len(packed), size // 4)
