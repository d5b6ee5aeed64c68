"""EngineConfig: every option of an engine. The command line's flags are generated from it.

Fields that are None are chosen at load, from the model and the machine, and logged.
"""

import math
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from os import PathLike
from typing import Any

from .errors import BadRequest, show

OPTIONAL = (
    "max_context",
    "max_kv_size",
    "chunk",
    "max_stall",
    "compile",
    "cuda_graphs",
    "dequantise",
)  # None: chosen at load
DETERMINISTIC = "every prompt is prefilled in steps of `chunk` tokens, whatever else runs, and no prefix is reused"
KV_KINDS = ("full", "paged", "q8", "q6", "q4", "q3", "q2", "k8v4")
DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def option(default: Any, text: str, **extra) -> Any:
    return field(default=default, metadata={"help": text, **extra})


@dataclass(frozen=True)
class EngineConfig:
    max_context: int | None = option(
        None, "tokens a sequence may hold, prompt and output (default: the model's own limit)"
    )
    kv_memory: int | str | None = option(None, "memory for the KV cache, like 4G (default: half of what is free)")
    memory: int | str | None = option(
        None, "limit on all memory, like 12G: weights, KV cache, activations (default: what the device gives)"
    )
    kv: str = option("full", "KV cache: full (= paged), or quantised to q8, q6, q4, q3, q2 or k8v4")
    max_kv_size: int | None = option(None, "sliding window of N tokens on full-attention layers")
    max_running: int = option(32, "sequences decoded together")
    chunk: int | None = option(None, "token budget of one step (default: chosen for the model and the device)")
    max_queue: int = option(4096, "requests that may wait in the queue")
    max_stall: int | None = option(
        None, "limit on prompt tokens between two tokens of a running stream (default: one step's)"
    )
    max_stall_ms: float | None = option(None, "the same limit in milliseconds, as measured while running")
    ahead: int = option(1, "decode steps launched before the oldest is read")
    deterministic: bool = option(False, "the same tokens in any batch, on a GPU too: one sequence per step; slower")
    prefix_cache: bool = option(True, "reuse the KV cache of earlier requests with the same prefix")
    disk_cache: str | None = option(None, "folder that keeps the prefix cache between runs")
    disk_cache_bytes: int | str = option("8G", "size limit of that folder, like 20G (default: 8G)")
    compile: bool | None = option(None, "compile the decode step (default: on a GPU)")
    cuda_graphs: bool | None = option(
        None, "launch repeating decode steps as CUDA graphs (default: on CUDA, where they can be captured)"
    )
    kernels: str = option("auto", "auto: mlxrt's kernels where they fit, strict: only those, reference: plain MLX only")
    dtype: str | None = option(
        None, "compute in float32, bfloat16 or float16 (default: float32 on CPU, else the checkpoint's)"
    )
    cpu_activations: str = option(
        "float32", "activations of packed products on a CPU: float32, or int8 as in llama.cpp (faster, not exact)"
    )
    dequantise: bool | None = option(None, "dequantise weights at load (default: on a CPU without kernels for them)")
    reasoning_parser: str | None = option(
        None, "format of the model's reasoning: think, mistral, gemma4, harmony or none (default: by its files)"
    )
    tool_parser: str | None = option(
        None, "format of its tool calls: hermes, qwen3_coder, llama3 ... or none (default: by its files)"
    )
    revision: str | None = option(None, "revision of a hub repository: branch, tag or commit")
    offline: bool = option(False, "never use the network")
    token: str | None = field(default=None, repr=False, metadata={"help": "access token of the hub", "flag": False})

    def __post_init__(self):
        for name, low, high in (
            ("max_context", 2, 1 << 31),
            ("max_kv_size", 1, 1 << 31),
            ("max_running", 1, 4096),
            ("chunk", 1, 1 << 20),
            ("ahead", 0, 8),
            ("max_queue", 1, 1 << 31),
            ("max_stall", 1, 1 << 31),
        ):
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            number = check_number(name, value, int, low, high, f"a whole number in {low}..{high}")
            object.__setattr__(self, name, number)
        for name in ("deterministic", "prefix_cache", "offline", "compile", "cuda_graphs", "dequantise"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in OPTIONAL):
                raise BadRequest(f"{name} must be True or False, not {show(value)}")
        for name in ("revision", "token", "reasoning_parser", "tool_parser"):
            if not isinstance(getattr(self, name), str | None):
                raise BadRequest(f"{name} must be a str, not {type(getattr(self, name)).__name__}")
        if self.cuda_graphs and self.compile is False:
            raise BadRequest("cuda_graphs does not apply with compile off: graphs are captured from compiled steps")
        if not isinstance(self.kv, str) or self.kv not in KV_KINDS:
            raise BadRequest(f"kv must be one of {', '.join(KV_KINDS)}, not {show(self.kv)}")
        if self.dtype is not None and (not isinstance(self.dtype, str) or self.dtype not in DTYPES):
            raise BadRequest(f"dtype must be {', '.join(DTYPES)}, not {show(self.dtype)}")
        if not isinstance(self.kernels, str) or self.kernels not in ("auto", "strict", "reference"):
            raise BadRequest(f"kernels must be auto, strict or reference, not {show(self.kernels)}")
        self._check_activations()
        for amount in (self.kv_memory, self.memory):
            if amount is not None:
                nbytes(amount)
        if self.max_stall_ms is not None:
            number = check_number("max_stall_ms", self.max_stall_ms, float, math.ulp(0.0), 1e9, "milliseconds > 0")
            object.__setattr__(self, "max_stall_ms", number)
        if self.deterministic:
            for name in ("max_stall", "max_stall_ms", "disk_cache"):
                if getattr(self, name) is not None:
                    raise BadRequest(f"{name} does not apply with deterministic: {DETERMINISTIC}")
        nbytes(self.disk_cache_bytes)
        if self.disk_cache is None and self.disk_cache_bytes != type(self).disk_cache_bytes:
            raise BadRequest("disk_cache_bytes limits the disk cache, which is off; give disk_cache a folder, too")
        if isinstance(self.disk_cache, PathLike):
            object.__setattr__(self, "disk_cache", str(self.disk_cache))
        if self.disk_cache is not None and (not isinstance(self.disk_cache, str) or not self.disk_cache):
            raise BadRequest(f"disk_cache must be the name of a folder, not {show(self.disk_cache)}")
        if self.disk_cache is not None and not self.prefix_cache:
            raise BadRequest("disk_cache keeps the prefix cache's content: it does not apply with prefix_cache off")

    def _check_activations(self) -> None:
        if not isinstance(self.cpu_activations, str) or self.cpu_activations not in ("float32", "int8"):
            raise BadRequest(f"cpu_activations must be float32 or int8, not {show(self.cpu_activations)}")
        others = {
            "kernels reference": self.kernels == "reference", "compile": self.compile, "dequantise": self.dequantise,
            f"dtype {self.dtype}": self.dtype not in (None, "float32"),
        }  # fmt: skip
        for name, without in others.items():
            if without and self.cpu_activations == "int8":
                raise BadRequest(f"cpu_activations int8 does not apply with {name}: CPU kernels round activations")

    @classmethod
    def options(cls) -> tuple[Field, ...]:
        """The fields that become command line flags."""
        return tuple(f for f in fields(cls) if f.metadata.get("flag", True))


def check_number(name: str, value: Any, kind: type, low: float, high: float, text: str) -> Any:
    """A number of an option as Python's own int or float: NumPy's are taken, too, bool is none."""
    number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not number or not low <= value <= high or not (isinstance(value, Integral) or math.isfinite(value)):
        raise BadRequest(f"{name} must be {text}, not {show(value)}")
    return int(value) if isinstance(value, Integral) else float(value)


def nbytes(text: int | str) -> int:
    """4096, "512M", "1.5G" -> bytes."""
    if isinstance(text, Integral) and not isinstance(text, bool) and 0 < text < 2**60:
        return int(text)
    if isinstance(text, str):
        number = text.strip().upper().removesuffix("B").removesuffix("I")
        unit = number[-1:] if number[-1:] in UNITS else ""
        try:
            value = float(number.removesuffix(unit)) * UNITS[unit]
        except ValueError:
            value = 0.0
        if 1 <= value < 2**60:
            return int(value)
    raise BadRequest(f"{show(text)} is no amount of memory; write bytes, or like 512M or 4G")
