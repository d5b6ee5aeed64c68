"""What a sequence's memory costs, by kind of layer, and how long a text fits a given room."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..cache.memory import ExternalKV, LayerSpec, Shared

MACS = (16, 32, 64, 128)  # GB of unified memory
GPU_SHARE = {16: 2 / 3, 32: 2 / 3, 64: 3 / 4, 128: 3 / 4}  # macOS lets a GPU take about so much of it


@dataclass(frozen=True)
class SequenceCost:
    """Layers of equal memory, counted."""

    groups: tuple[tuple[LayerSpec, int], ...]

    @classmethod
    def of(cls, specs: list[LayerSpec | Shared]) -> "SequenceCost":
        return cls(tuple(Counter(s for s in specs if not isinstance(s, Shared)).items()))

    @property
    def per_token(self) -> float:
        """Bytes one more token takes, all layers together, while no window is full."""
        return sum(n * s.nbytes() / s.size for s, n in self.groups if grows(s))

    def nbytes(self, tokens: int) -> float:
        """Bytes of a sequence of so many tokens."""
        return sum(n * self._layer(s, tokens) for s, n in self.groups)

    @staticmethod
    def _layer(spec: Any, tokens: int) -> float:
        if not grows(spec):
            return spec.nbytes()
        held = tokens if spec.window is None else min(tokens, spec.window)
        return held * spec.nbytes() / spec.size

    def longest(self, room: float, limit: int) -> int:
        """Tokens of one sequence that fit."""
        if self.nbytes(1) > room:
            return 0
        low, high = 1, limit
        while low < high:  # the largest that fits lies in low..high
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(middle) <= room else (low, middle - 1)
        return low

    def told(self) -> list[dict[str, Any]]:
        return [self._group(s, n) for s, n in self.groups]

    @staticmethod
    def _group(spec: Any, layers: int) -> dict[str, Any]:
        if isinstance(spec, ExternalKV):
            return {
                "kind": "mlx-lm's caches",
                "layers": "all",
                "bytes_per_token": spec.nbytes() / spec.size if spec.grows else 0.0,
            }
        if not spec.paged:
            return {"kind": "state", "layers": layers, "bytes_per_sequence": layers * spec.nbytes()}
        kind = "full" if spec.window is None else f"window {spec.window}"
        return {"kind": kind, "layers": layers, "bytes_per_token": layers * spec.nbytes() / spec.size}

    def on_macs(self, weights: int, limit: int) -> dict[str, int]:
        """The longest text on Macs of these sizes, all the GPU may take given to weights and one sequence."""
        rooms = {gb: GPU_SHARE[gb] * gb * 2**30 - weights for gb in MACS}
        return {f"{gb} GB": self.longest(room, limit) for gb, room in rooms.items()}


def grows(spec: Any) -> bool:
    """Whether a longer text takes more of it."""
    return spec.grows if isinstance(spec, ExternalKV) else spec.paged
