"""Type-checked access to the GGUF metadata of one architecture."""

import math
from collections.abc import Mapping
from typing import Any

from ....errors import BadCheckpoint, UnsupportedModel, quote


class ArchMetadata:
    """The keys below the architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.metadata, self.architecture = metadata, architecture

    def find(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def uniform(self, key: str) -> Any:
        """A value that may be given per layer but must be the same for all."""
        value = self.find(key)
        if not isinstance(value, list) or not value:
            return value
        if any(v != value[0] for v in value):
            raise UnsupportedModel(f"{self.architecture}.{key} differs between layers, which is not supported")
        return value[0]

    def wrong(self, key: str, expected: str) -> BadCheckpoint:
        found = "nothing" if self.find(key) is None else quote(self.find(key))
        return BadCheckpoint(f"GGUF key {self.architecture}.{key} must be {expected}, found {found}; convert it again")

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.uniform(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value < 2**31:
            raise self.wrong(key, f"an integer >= {low}")
        return value

    def integers(self, key: str, count: int, default: int | None = None) -> list[int]:
        """One integer per layer, or one for all."""
        value = self.find(key)
        if not isinstance(value, list):
            return [self.integer(key, default)] * count
        if len(value) != count or any(type(v) is not int or not 1 <= v < 2**31 for v in value):
            raise self.wrong(key, f"an integer >= 1, or {count} of them, one for each layer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.uniform(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a finite number > 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.find(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def booleans(self, key: str, count: int) -> list[bool]:
        """One boolean per layer."""
        value = self.find(key)
        if not isinstance(value, list) or len(value) != count or any(v not in (0, 1) for v in value):
            raise self.wrong(key, f"an integer, or {count} booleans, one for each layer")
        return [bool(v) for v in value]
