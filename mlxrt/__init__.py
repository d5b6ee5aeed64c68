"""mlxrt: LLM runtime for Apple Silicon, on MLX. The public names and nothing else."""

from . import blas

blas.preload()  # before MLX: whoever is there first answers for its matmuls

try:
    import mlx.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        "mlxrt found no MLX backend. Install one: pip install 'mlxrt[cpu]' (Linux without a GPU), 'mlxrt[cuda12]' or "
        f"'mlxrt[cuda13]' (NVIDIA); on macOS plain 'pip install mlxrt' brings Metal. ({error})"
    ) from None

from .config import EngineConfig
from .engine import Engine, Stats
from .errors import (
    BadCheckpoint,
    BadRequest,
    BadSnapshot,
    BadTemplate,
    BadTokenizer,
    CacheCorrupt,
    CannotRewind,
    ContextOverflow,
    EngineClosed,
    EvictedBlock,
    HubError,
    MlxrtError,
    ModelNotFound,
    NoRoom,
    NoTokenizer,
    QueueFull,
    StaleLogits,
    UnsupportedModel,
    WontFit,
)
from .load import load
from .logits import LogitsRow, LogitsView
from .request import Completion, Event, Finish, Request, SamplingParams, Timings
from .session import Session

__version__ = "0.1.0"

__all__ = [
    "BadCheckpoint",
    "BadRequest",
    "BadSnapshot",
    "BadTemplate",
    "BadTokenizer",
    "CacheCorrupt",
    "CannotRewind",
    "Completion",
    "ContextOverflow",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "Event",
    "EvictedBlock",
    "Finish",
    "HubError",
    "LogitsRow",
    "LogitsView",
    "MlxrtError",
    "ModelNotFound",
    "NoRoom",
    "NoTokenizer",
    "QueueFull",
    "Request",
    "SamplingParams",
    "Session",
    "StaleLogits",
    "Stats",
    "Timings",
    "UnsupportedModel",
    "WontFit",
    "load",
]
