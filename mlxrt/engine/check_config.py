"""What the configuration and this machine rule out between them: refused before a model is looked for."""

from collections.abc import Iterable
from pathlib import Path

from ..cache.memory import LayerSpec
from ..cache.storage.disk_index import prepare_root
from ..config import EngineConfig
from ..errors import BadRequest
from ..kernels import Kernels, device
from ..text.parsing.select import check_parser


def check_config(config: EngineConfig, backend: str) -> None:
    """`backend`: what kernels are made for."""
    check_graphs(config)
    check_activations(config)
    if backend == "cpu":
        Kernels(config.kernels)  # strict needs a GPU
    check_parser(config.reasoning_parser, "reasoning")
    check_parser(config.tool_parser, "tool")
    if config.disk_cache is not None:
        prepare_root(disk_folder(config))


def check_graphs(config: EngineConfig) -> None:
    if config.cuda_graphs and device.backend() != "cuda":
        raise BadRequest(f"cuda_graphs does not apply: this device is {device.backend()}")


def check_activations(config: EngineConfig) -> None:
    if config.cpu_activations != "float32" and device.backend() != "cpu":
        raise BadRequest(f"cpu_activations does not apply: this device is {device.backend()}")


def check_disk_cache(specs: Iterable[LayerSpec]) -> None:
    if not all(spec.portable for spec in specs):
        raise BadRequest("disk_cache does not apply: a model that runs through mlx-lm keeps its memory there")


def disk_folder(config: EngineConfig) -> Path:
    return Path(str(config.disk_cache)).expanduser().absolute()
