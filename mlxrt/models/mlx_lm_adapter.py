"""Every architecture mlx-lm has and mlxrt has no file for: mlx-lm's module behind our engine, scheduler and sampler.

Uses mlx-lm's modules and cache functions as published, and imports them (seconds) only when such a model is asked for.
Reuse follows what its caches can do exactly: cutting tokens off where all of them are plain or a window not yet full,
copies everywhere else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..cache.external import NO_LIMIT
from ..cache.memory import ExternalKV
from ..cache.memory.external import arrays_of
from ..errors import BadCheckpoint, UnsupportedModel, quote
from .base import CausalLM
from .config import report

# What mlx-lm's constructors raise for a config they cannot use: they check nothing themselves.
REFUSALS = (
    TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, NotImplementedError, RuntimeError,
    AssertionError,
)  # fmt: skip
CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_context_length",
    "model_max_length", "max_target_positions", "seq_length", "n_ctx", "seq_len",
)  # fmt: skip
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers", "depth")
MAX_LAYERS, MAX_TOKENS = 1 << 12, 1 << 30
UNLIMITED = 1 << 20  # tokens, where a config names no limit
# Modules of mlx-lm whose answers depend on where a prompt was cut, and why: a reused prefix is a cut.
CUT_DEPENDENT = {
    "plamo3": "longer than its window depend on how the prompt was cut: its mask sees one token more than its cache"
}
PROBE = 256  # tokens between the two lengths at which a cache is measured: mlx-lm grows its caches by so many


@dataclass(frozen=True)
class MlxLmConfig:
    """As much of a foreign config.json as the engine must know; the module reads `raw` itself."""

    model_type: str
    vocab_size: int
    context: int
    raw: Mapping[str, Any] = field(repr=False)

    rope = None  # the module's own business
    windows: tuple[int | None, ...] = ()

    def number(self, *names: str) -> int | None:
        """The first of these keys that holds a usable number."""
        return next((n for name in names if is_count(n := first_value(self.raw, [name]), MAX_TOKENS)), None)

    @property
    def num_hidden_layers(self) -> int | None:
        return self.number(*DEPTH_KEYS)

    @property
    def hidden_size(self) -> int | None:
        return self.number("hidden_size", "n_embd", "d_model", "dim", "model_dim")

    @property
    def num_attention_heads(self) -> int | None:
        return self.number("num_attention_heads", "n_head", "n_heads", "num_heads")

    @property
    def num_key_value_heads(self) -> int | None:
        return self.number("num_key_value_heads", "num_kv_heads") or self.num_attention_heads

    @property
    def head_dim(self) -> int | None:
        wide, heads = self.hidden_size, self.num_attention_heads
        return self.number("head_dim") or (wide // heads if wide and heads else None)


class MlxLm(CausalLM):
    config: MlxLmConfig  # type: ignore[assignment]
    is_adapter = True

    def __init__(self, config: MlxLmConfig):
        super().__init__()
        self.config = config
        self.module = construct(config.raw)
        self.module.eval()

    @classmethod
    def parse(cls, raw: dict) -> MlxLmConfig:  # type: ignore[override]
        kind = raw["model_type"]
        if raw.get("model_file") is not None:
            raise UnsupportedModel(
                f"config.json: model_file = {quote(raw['model_file'])} asks to run code from the checkpoint, "
                "which mlxrt does not"
            )
        context = next((n for key in CONTEXT_KEYS if is_count(n := first_value(raw, [key]), MAX_TOKENS)), None)
        if context is None:
            context = UNLIMITED
            report(f"config.json names no context length; sequences may have {context} tokens (max_context)")
        return MlxLmConfig(kind, read_vocab_size(raw), context, raw)

    def __call__(self, tokens, views):
        return views[0].run(self._call, tokens)

    def _call(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.module(tokens, cache=cache)

    def logits(self, hidden):
        return hidden  # the module's head is part of it

    @property
    def dtype(self) -> mx.Dtype:
        """What most of it is kept in: some modules have single vectors in float32."""
        flat: Any = tree_flatten(self.module.parameters())
        held = [a for _, a in flat if mx.issubdtype(a.dtype, mx.floating)]
        return max(held, key=lambda a: a.nbytes).dtype

    def cache_specs(self):
        return [self._memory]

    @cached_property
    def _memory(self) -> ExternalKV:
        """One spec for all layers: what mlx-lm's caches cost and can do. Nothing is computed, shapes suffice."""
        small, large = (self._measure(n) for n in (1, 1 + PROBE))
        token = max(0, large - small) / PROBE
        unit = max(1, round(32 * token) or small)
        base = -(-max(0, round(small - token)) // unit)
        caches = import_module("mlx_lm.models.cache")
        return ExternalKV(
            unit, max(1, base), token > 0, trim_limit(self._fresh()), self._fresh, caches.trim_prompt_cache
        )

    def _fresh(self) -> list[Any]:
        return import_module("mlx_lm.models.cache").make_prompt_cache(self.module)

    def _measure(self, n: int) -> int:
        """Bytes of the caches of n tokens."""
        cache = self._fresh()
        try:
            out = self._call(mx.zeros((1, n), mx.uint32), cache)
        except REFUSALS as bad:
            raise build_error(self.config.model_type, bad) from None
        if out.shape != (1, n, self.config.vocab_size):
            raise BadCheckpoint(
                f"config.json: vocab_size is {self.config.vocab_size}, but {self.config.model_type} in mlx-lm "
                f"answers with {list(out.shape)} for {n} tokens"
            )
        return sum(array.nbytes for array in arrays_of(cache))

    def describe(self) -> str:
        """What a user of this model must know: one line."""
        known = CUT_DEPENDENT.get(self.config.model_type)
        return (
            f"{self.config.model_type} runs through mlx-lm {version()}: rows of a batch run one after another, "
            f"steps are not compiled, conversations cannot be saved; reused: {self._memory.reuse}"
            + (f"; answers to texts {known} (prefix_cache=False and one chunk give a fresh run's)" if known else "")
        )


def find_adapter(kind: str, natives: str) -> type[MlxLm]:
    """The adapter, where mlx-lm has this model_type."""
    if not has_model(kind):
        raise UnsupportedModel(
            f"model_type {quote(kind)} is not supported: mlxrt computes {natives}, "
            f"and mlx-lm {version()} has it not either"
        )
    return MlxLm


@cache
def has_model(kind: str) -> bool:
    """Whether mlx-lm computes a model_type. Its files are looked at before it is imported."""
    found = find_spec("mlx_lm")
    if found is None or not found.submodule_search_locations or not re.fullmatch(r"[\w-]{1,64}", kind):
        return False
    folder = Path(found.submodule_search_locations[0]) / "models"
    if not (folder / f"{kind}.py").is_file() and kind not in import_module("mlx_lm.utils").MODEL_REMAPPING:
        return False
    module = import_model(kind)
    return "Model" in vars(module) and "ModelArgs" in vars(module)


def import_model(kind: str) -> ModuleType:
    name = import_module("mlx_lm.utils").MODEL_REMAPPING.get(kind, kind)
    try:
        return import_module(f"mlx_lm.models.{name}")
    except (ImportError, SystemExit) as bad:  # olmo's module ends the process when its package is missing
        raise UnsupportedModel(
            f"mlx-lm's module of {quote(kind)} cannot be imported here ({bad or 'it exits'})"
        ) from None


def version() -> str:
    from importlib.metadata import version as installed

    return installed("mlx-lm")


def construct(raw: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's module of a config, its weights never computed."""
    kind = raw["model_type"]
    for key in DEPTH_KEYS:
        if (depth := first_value(raw, [key])) is not None and not is_count(depth, MAX_LAYERS):
            raise BadCheckpoint(f"config.json: {key} = {quote(depth)} is not a usable number of layers")
    parts = vars(import_model(kind))
    try:
        return parts["Model"](parts["ModelArgs"].from_dict(dict(raw)))
    except REFUSALS as bad:
        raise build_error(kind, bad) from None


def build_error(kind: str, bad: BaseException) -> BadCheckpoint:
    message = " ".join(str(bad).split())[:160]
    return BadCheckpoint(f"config.json: mlx-lm cannot build {quote(kind)} from it ({type(bad).__name__}: {message})")


def trim_limit(caches: list[Any]) -> int:
    """Below how many tokens cutting tokens off is exact.

    Asked by type: some caches of mlx-lm call themselves trimmable and forget what is needed (ChunkedKVCache), or take
    what was cut off into the next answer (ConcatenateKVCache).
    """
    kinds = vars(import_module("mlx_lm.models.cache"))
    limit = NO_LIMIT
    for one in caches:
        if type(one) is kinds["CacheList"]:
            limit = min(limit, trim_limit(list(one.caches)))
        elif type(one) is kinds["RotatingKVCache"]:
            limit = min(limit, one.max_size)
        elif type(one) is not kinds["KVCache"]:
            return 0
    return limit


def read_vocab_size(raw: Mapping[str, Any]) -> int:
    size = first_value(raw, ["vocab_size"])
    if not is_count(size, 1 << 24):
        raise BadCheckpoint(f"config.json: vocab_size = {quote(size)} is not a usable number of tokens")
    return size


def first_value(raw: Mapping[str, Any], names) -> Any:
    nested = raw.get("text_config")
    for place in (nested if isinstance(nested, Mapping) else {}, raw):
        for name in names:
            if place.get(name) is not None:
                return place[name]
    return None


def is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most
