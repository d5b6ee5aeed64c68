"""Where weights come from: folders, GGUF files, the hub; names, quantised layouts, filling a model.

Exports only. Each file format has its own file; none of them knows an architecture.
"""

from .checkpoint import Checkpoint, TensorInfo
from .fill import build
from .folder import FolderCheckpoint
from .gguf import GgufCheckpoint

__all__ = ["Checkpoint", "FolderCheckpoint", "GgufCheckpoint", "TensorInfo", "build"]
