"""mlxrt: LLM runtime for Apple Silicon, on MLX. The public names and nothing else.

Each is imported when it is first asked for, so that `import mlxrt` and `mlxrt --help` cost next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import blas

blas.preload()  # before MLX: whoever is there first answers for its matmuls

try:
    import mlx.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        "mlxrt found no MLX backend. Install one: pip install 'mlxrt[cpu]' (Linux without a GPU), 'mlxrt[cuda12]' or "
        f"'mlxrt[cuda13]' (NVIDIA); on macOS plain 'pip install mlxrt' brings Metal. ({error})"
    ) from None

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .budget import Cost
    from .config import EngineConfig
    from .engine import Engine
    from .errors import (
        BadCheckpoint,
        BadLogits,
        BadRequest,
        BadSnapshot,
        BadTemplate,
        BadTokenizer,
        CacheCorrupt,
        CannotRewind,
        ContextOverflow,
        EngineClosed,
        EngineFailed,
        EvictedBlock,
        HubError,
        MlxrtError,
        ModelNotFound,
        NoRoom,
        NoTokenizer,
        PromptWontFit,
        QueueFull,
        StaleLogits,
        UnsupportedModel,
        WontFit,
    )
    from .loader import load
    from .logits import LogitsRow, LogitsView
    from .request import Completion, EngineEvent, Event, Finish, Request, SamplingParams, Timings
    from .session import Session
    from .stats import Stats

__version__ = "0.1.0"

ERRORS = """BadCheckpoint BadLogits BadRequest BadSnapshot BadTemplate BadTokenizer CacheCorrupt CannotRewind
    ContextOverflow EngineClosed EngineFailed EvictedBlock HubError MlxrtError ModelNotFound NoRoom NoTokenizer
    PromptWontFit QueueFull StaleLogits UnsupportedModel WontFit""".split()
HOMES = dict.fromkeys(ERRORS, "errors") | {
    "AsyncEngine": "async_engine",
    "Completion": "request",
    "Cost": "budget",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineEvent": "request",
    "Event": "request",
    "Finish": "request",
    "LogitsRow": "logits",
    "LogitsView": "logits",
    "Request": "request",
    "SamplingParams": "request",
    "Session": "session",
    "Stats": "stats",
    "Timings": "request",
    "load": "loader",
}

__all__ = [
    "AsyncEngine",
    "BadCheckpoint",
    "BadLogits",
    "BadRequest",
    "BadSnapshot",
    "BadTemplate",
    "BadTokenizer",
    "CacheCorrupt",
    "CannotRewind",
    "Completion",
    "ContextOverflow",
    "Cost",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineEvent",
    "EngineFailed",
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
    "PromptWontFit",
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


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'mlxrt' has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
