"""What runs through the model at once. Plain data, made by the scheduler."""

from dataclasses import dataclass

from .request import Sequence


@dataclass(frozen=True)
class Slice:
    """Tokens [start, stop) of one sequence. The slice that reaches its end samples."""

    seq: Sequence
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True)
class Step:
    slices: tuple[Slice, ...]  # those of one token first
    checkpoint: bool = False  # a state inside a running batch will be kept: it must reach the pool
    prompted: int = 0  # tokens of it that no stream has been waiting for

    @property
    def decode(self) -> bool:
        return all(s.stop - s.start == 1 for s in self.slices)
