"""Where weights come from: folders, GGUF files, the hub; names, quantised layouts, filling a model.

Exports only. Each file format has its own file; none of them knows an architecture.
"""

from .formats.checkpoint import Checkpoint, TensorInfo
from .formats.folder import FolderCheckpoint
from .formats.gguf.checkpoint import GgufCheckpoint
from .load.fill import build

__all__ = ["Checkpoint", "FolderCheckpoint", "GgufCheckpoint", "TensorInfo", "build"]
