"""mlxrt: LLM runtime for Apple Silicon, on MLX. The public names and nothing else.

Each is imported when it is first asked for, so that `import mlxrt` and `mlxrt --help` cost next to nothing.
"""

from . import _interrupt

_interrupt.end_quietly()  # before anything that takes time

from importlib import import_module  # noqa: E402

from . import _openblas  # noqa: E402

_openblas.preload()  # before MLX, which takes the BLAS that is already loaded

missing_backend: ImportError | None = None  # raised when a public name is asked for: `mlxrt --help` works without
try:
    import mlx.core  # noqa: F401
except ImportError as error:
    missing_backend = error

__version__ = "0.1.0"

ERRORS = """BadCheckpoint BadLogits BadRequest BadSnapshot BadTemplate BadTokenizer CacheCorrupt CannotRewind
    ContextOverflow EngineClosed EngineFailed EvictedBlock GrammarFailed HubError MlxrtError ModelNotFound
    NoKernel NoRoom NoTokenizer PromptWontFit QueueFull StaleLogits UnsupportedContent UnsupportedModel
    WontFit""".split()
HOMES = dict.fromkeys(ERRORS, "errors") | {
    "AsyncEngine": "engine.async_engine",
    "AsyncReply": "engine.async_stream",
    "AsyncSession": "engine.async_engine",
    "AsyncStream": "engine.async_stream",
    "Completion": "engine.request",
    "Cost": "engine.memory",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "EngineEvent": "engine.request",
    "Event": "engine.request",
    "Finish": "engine.request",
    "LogitsRow": "engine.logits",
    "LogitsView": "engine.logits",
    "Reply": "engine.session",
    "Request": "engine.request",
    "SamplingParams": "engine.request",
    "Session": "engine.session",
    "Stats": "engine.stats",
    "Timings": "engine.request",
    "ToolCall": "text.parsing.segments",
    "ToolCallDelta": "text.parsing.segments",
    "load": "engine.load",
}

__all__ = [*HOMES]  # types for checkers: __init__.pyi


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module 'mlxrt' has no attribute {name!r}")
    if missing_backend:
        raise ImportError(f"{import_module('.errors', __name__).NO_BACKEND} ({missing_backend})")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
