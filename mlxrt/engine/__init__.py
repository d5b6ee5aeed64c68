"""The engine: requests, scheduler, model runner, sampler, outputs, sessions.

Names are imported when they are first asked for, so that `mlxrt.engine.scheduler` can be imported without MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .engine import Engine, Source
    from .load import load

HOMES = {"AsyncEngine": "async_engine", "Engine": "engine", "Source": "engine", "load": "load"}

__all__ = ["AsyncEngine", "Engine", "Source", "load"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'mlxrt.engine' has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)
