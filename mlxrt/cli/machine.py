"""What this machine has for a model: device, memory, libraries. Knows no model."""

from importlib.metadata import version
from typing import Any

import mlx.core as mx

from .. import __version__
from .. import _openblas as blas
from ..kernels import backend, device


def machine() -> dict[str, Any]:
    total, free = device.memory()
    kind = device.kind()
    found = {
        "mlxrt": __version__,
        "mlx": version("mlx"),
        "device": kind,
        "device_name": str(mx.device_info().get("device_name", "")) or kind,
        "memory_bytes": total,
        "free_bytes": free,
        "kernels": "plain MLX: no GPU" if backend() == "reference" else "our own where they fit, else plain MLX",
    }
    return found | ({"blas": blas.running()} if kind == "cpu" else {})
