"""Weights: resolving model names, reading checkpoint formats, building and converting models."""

from .formats.checkpoint import Checkpoint, TensorInfo
from .formats.folder import FolderCheckpoint
from .formats.gguf.checkpoint import GgufCheckpoint
from .load.build import build

__all__ = ["Checkpoint", "FolderCheckpoint", "GgufCheckpoint", "TensorInfo", "build"]
