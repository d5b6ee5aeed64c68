"""The model that is measured, and which engines can run it here. Starts nothing and loads nothing."""

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.load import is_packed, open_checkpoint
from ..errors import BadRequest, WontFit
from ..kernels import device
from ..weights.load.fingerprint import weights_digest
from ..weights.source.resolve import Located, locate
from .export import export
from .work import Work, work_of

MODULES = {"mlx-lm": "mlx_lm", "llama.cpp": "xllamacpp"}
ROOM = 1.15  # of the weights: caches, activations, what loading needs besides


class TooLarge(WontFit):
    """The model does not fit beside its peers: the call was wrong, nothing was tried."""

    exit_code = 2


@dataclass(frozen=True)
class Subject:
    located: Located
    work: Work
    digest: str

    @classmethod
    def find(cls, name: str, dtype: str | None = None) -> "Subject":
        located = locate(name)
        return cls(located, work_of(located, dtype), digest_of(located))

    def check_fits(self, sides: int) -> None:
        """Before anything is allocated."""
        total, free = device.memory()
        need = int(self.work.resident * ROOM) * sides
        if need > free:
            raise TooLarge(
                f"{self.located.name} needs {need / 1e9:.1f} GB for {sides} engine{'s' * (sides > 1)}, "
                f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free; take a smaller model, fewer bits or fewer peers"
            )

    def to_dict(self) -> dict[str, Any]:
        where = None if self.located.path is None else at_home(self.located.path)
        told = {"name": self.located.name, "kind": self.located.kind, "path": where, "digest": self.digest}
        return told | {"work": self.work.to_dict()}


def at_home(path: Path) -> str:
    """As others may read it: reports are passed on and committed."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def digest_of(located: Located) -> str:
    """Of the weights' bytes; of a shape, whose weights follow from its name, the config's."""
    if located.shape is not None:
        return hashlib.sha256(f"{located.shape} {located.shape.config}".encode()).hexdigest()
    return weights_digest(tuple(open_checkpoint(located).files()))


def check_peer(name: str) -> None:
    if name not in MODULES and not name.startswith(("http://", "https://")):
        raise BadRequest(f"no peer goes by {name!r}; there are {', '.join(MODULES)}, and any http(s):// URL")


def absence(name: str, subject: Subject) -> str | None:
    """Why a peer cannot take part; None where it can."""
    if name not in MODULES:
        return None  # a URL: whoever asks it will see
    if importlib.util.find_spec(MODULES[name]) is None:
        return f"not installed (pip install {MODULES[name].replace('_', '-')})"
    if name == "llama.cpp" and subject.located.kind != "gguf":
        return "it reads GGUF files, and this model is none"
    return None


def setting(name: str, subject: Subject, context: int, parallel: int, threads: int) -> dict[str, Any]:
    """What a peer's side is started with: the same weights, on a CPU in float32."""
    if name == "mlx-lm":
        return mlx_lm_setting(subject.located)
    gpu = device.kind() != "cpu"
    sizes = {"context": context, "parallel": parallel, "threads": threads, "gpu": gpu}
    return {"gguf": str(subject.located.path), **sizes}


def mlx_lm_setting(located: Located) -> dict[str, Any]:
    if located.shape is not None:
        return {"shape": located.name}
    on_cpu = device.kind() == "cpu"
    if located.kind == "gguf":
        return {"folder": str(export("plain" if on_cpu else "packed", located))}
    checkpoint = open_checkpoint(located)
    wide = all(info.dtype == "F32" for info in checkpoint.sizes().values())
    if on_cpu and (is_packed(checkpoint) or not wide):
        return {"folder": str(export("plain", located))}
    return {"folder": str(located.path)}


def thread_count(load: float) -> int:
    """Cores that are free: engines whose threads wait for each other crawl when one of them has to wait for a core."""
    cores = os.cpu_count() or 1
    return max(1, min(cores, round(cores - load)))
