"""The model that is measured, and which peers can run it here. Starts nothing and loads nothing."""

import hashlib
import importlib.util
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engine.load import open_checkpoint
from ..engine.load_plan import is_packed
from ..errors import BadRequest, WontFit
from ..kernels import device
from ..weights.identity import weights_digest
from ..weights.source.resolve import ResolvedModel, resolve
from .export import export
from .token_cost import TokenCost, token_cost

MODULES = {"mlx-lm": "mlx_lm", "llama.cpp": "xllamacpp"}
MEMORY_FACTOR = 1.15  # of the weights: KV cache, activations, what loading needs


class TooLarge(WontFit):
    """The model does not fit beside its peers; raised before anything is loaded."""

    exit_code = 2


@dataclass(frozen=True)
class BenchModel:
    resolved: ResolvedModel
    cost: TokenCost
    digest: str

    @classmethod
    def find(cls, name: str, dtype: str | None = None) -> "BenchModel":
        resolved = resolve(name)
        return cls(resolved, token_cost(resolved, dtype), weights_id(resolved))

    def check_fits(self, engines: int) -> None:
        """Refuse a model too large for so many engines, before anything is allocated."""
        total, free = device.memory()
        need = int(self.cost.weight_bytes * MEMORY_FACTOR) * engines
        if need > free:
            raise TooLarge(
                f"{self.resolved.name} needs {need / 1e9:.1f} GB for {engines} engine{'s' * (engines > 1)}, "
                f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free; take a smaller model, fewer bits or fewer peers"
            )

    def to_dict(self) -> dict[str, Any]:
        path = None if self.resolved.path is None else hide_home(self.resolved.path)
        names = {"name": self.resolved.name, "kind": self.resolved.kind, "path": path, "digest": self.digest}
        return names | {"work": asdict(self.cost)}


def hide_home(path: Path) -> str:
    """A path without the user's home folder: reports are shared and committed."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def weights_id(resolved: ResolvedModel) -> str:
    """Digest of the weights; of a shape, whose random weights follow from its name, that of its config."""
    if resolved.shape is not None:
        return hashlib.sha256(f"{resolved.shape} {resolved.shape.config}".encode()).hexdigest()
    return weights_digest(tuple(open_checkpoint(resolved).files()))


def check_peer(name: str) -> None:
    if name not in MODULES and not name.startswith(("http://", "https://")):
        raise BadRequest(f"unknown peer {name!r}; there are {', '.join(MODULES)}, and any http(s):// URL")


def unavailable_reason(name: str, model: BenchModel) -> str | None:
    """Why a peer cannot take part; None where it can, or where only asking it (a URL) tells."""
    if name not in MODULES:
        return None
    if importlib.util.find_spec(MODULES[name]) is None:
        return f"not installed (pip install {MODULES[name].replace('_', '-')})"
    if name == "llama.cpp" and model.resolved.kind != "gguf":
        return "it reads GGUF files, and this model is none"
    return None


def peer_setting(name: str, model: BenchModel, context: int, parallel: int, threads: int) -> dict[str, Any]:
    """What a peer's backend is started with: the same weights, on a CPU in float32."""
    if name == "mlx-lm":
        return mlx_lm_setting(model.resolved)
    sizes = {"context": context, "parallel": parallel, "threads": threads, "gpu": device.backend() != "cpu"}
    return {"gguf": str(model.resolved.path), **sizes}


def mlx_lm_setting(resolved: ResolvedModel) -> dict[str, Any]:
    if resolved.shape is not None:
        return {"shape": resolved.name}
    on_cpu = device.backend() == "cpu"
    if resolved.kind == "gguf":
        return {"folder": str(export("plain" if on_cpu else "packed", resolved))}
    checkpoint = open_checkpoint(resolved)
    is_float32 = all(info.dtype == "F32" for info in checkpoint.sizes().values())
    exported = on_cpu and (is_packed(checkpoint) or not is_float32)
    return {"folder": str(export("plain", resolved) if exported else resolved.path)}


def free_cores(load: float) -> int:
    """Threads for every engine: an engine crawls when one of its threads has to wait for a core."""
    cores = os.cpu_count() or 1
    return max(1, min(cores, round(cores - load)))
