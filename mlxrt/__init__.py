"""mlxrt: LLM runtime for Apple Silicon, on MLX. The public names and nothing else.

Each is imported when it is first asked for, so that `import mlxrt` and `mlxrt --help` cost next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _openblas

_openblas.preload()  # before MLX: whoever is there first answers for its matmuls

try:
    import mlx.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        "mlxrt found no MLX backend. Install one: pip install 'mlxrt[cpu]' (Linux without a GPU), 'mlxrt[cuda12]' or "
        f"'mlxrt[cuda13]' (NVIDIA); on macOS plain 'pip install mlxrt' brings Metal. ({error})"
    ) from None

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine.async_engine import AsyncEngine
    from .engine.engine import Engine
    from .engine.load import load
    from .engine.logits import LogitsRow, LogitsView
    from .engine.memory import Cost
    from .engine.request import Completion, EngineEvent, Event, Finish, Request, SamplingParams, Timings
    from .engine.session import Session
    from .engine.stats import Stats
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

__version__ = "0.1.0"

ERRORS = """BadCheckpoint BadLogits BadRequest BadSnapshot BadTemplate BadTokenizer CacheCorrupt CannotRewind
    ContextOverflow EngineClosed EngineFailed EvictedBlock HubError MlxrtError ModelNotFound NoRoom NoTokenizer
    PromptWontFit QueueFull StaleLogits UnsupportedModel WontFit""".split()
HOMES = dict.fromkeys(ERRORS, "errors") | {
    "AsyncEngine": "engine.async_engine",
    "Completion": "engine.request",
    "Cost": "engine.memory",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "EngineEvent": "engine.request",
    "Event": "engine.request",
    "Finish": "engine.request",
    "LogitsRow": "engine.logits",
    "LogitsView": "engine.logits",
    "Request": "engine.request",
    "SamplingParams": "engine.request",
    "Session": "engine.session",
    "Stats": "engine.stats",
    "Timings": "engine.request",
    "load": "engine.load",
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
