"""From a name to an engine that is ready to answer."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn

from .. import _openblas as blas
from ..cache.memory import ExternalKV
from ..config import EngineConfig
from ..errors import BadRequest, ContextOverflow, NoTokenizer
from ..kernels import Kernels, backend, device, make_gpu
from ..kernels.cuda.module_cache import announce_compiling, use_module_folder
from ..kernels.dtypes import DTYPES
from ..kernels.mlx_defects import ask_for_exact_float32
from ..kernels.selftest import verify_on_first_use
from ..models import CausalLM, find
from ..models.pack_modules import Packed, has_packed_layers, pack_modules, widen_halves
from ..text import Tokenizer
from ..text.grammar import check_format
from ..weights import Checkpoint, FolderCheckpoint, GgufCheckpoint, build
from ..weights.formats.gguf.tensors import BLOCKS, SPLIT, UNPACKED
from ..weights.identity import FileStamp, check_loaded, stamp_files
from ..weights.random_models import Shape, random_weights
from ..weights.source.cache_dir import cache_root
from ..weights.source.resolve import ResolvedModel, resolve
from .check_config import check_config
from .cpu_kernels import ROWS_DIFFER, open_cpu_kernels, products_depend_on_rows
from .engine import Engine, Source, encode_text, refuse_beyond_context
from .load_plan import (
    LoadPlan,
    check_plan,
    compute_dtype,
    confirm_plan,
    is_packed,
    plan_checkpoint,
    plan_shape,
    uses_cpu_kernels,
)
from .memory import refuse_overflow
from .options import EngineOptions, spell_out
from .process_exit import track_thread
from .request import EngineEvent, Request

log = logging.getLogger("mlxrt")


@spell_out(EngineOptions)
def load(
    name: str,
    config: EngineConfig = EngineConfig(),  # noqa: B008  frozen
    *,
    on_event: Callable[[EngineEvent], None] | None = None,
    **options: Unpack[EngineOptions],
) -> Engine:
    """An engine for an alias, a folder, a .gguf file, a hub id or a `shape:`.

    Keywords are the fields of `EngineConfig`, and win over those of `config`. `on_event` is called with what happens to
    requests; what is worth knowing is logged as `mlxrt`.
    """
    return open_model(name, merge_options(config, options)).load(on_event)


def merge_options(config: EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
    if not isinstance(config, EngineConfig):
        raise BadRequest(f"config must be an EngineConfig, not {type(config).__name__}; or give its fields as keywords")
    known = [f.name for f in fields(EngineConfig)]
    if unknown := sorted(options.keys() - known):
        raise BadRequest(f"unknown option {', '.join(unknown)}; known: {', '.join(known)}")
    return replace(config, **options)


@dataclass(frozen=True)
class OpenModel:
    """A model whose headers and tokenizer were read and fit the config. Its weights are not loaded yet."""

    config: EngineConfig
    plan: LoadPlan
    source: Source
    tokenizer: Tokenizer | None = None
    checkpoint: Checkpoint | None = None
    shape: Shape | None = None
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)  # of the files, before any was read

    @property
    def context(self) -> int:
        """Tokens a sequence may hold, if there is memory for so many."""
        return self.config.max_context or self.plan.outline.config.context

    def check_prompt(self, request: Request) -> None:
        """Refuse what the chat template does not take, what the model's context cannot hold and what no answer can be
        held to, before a weight is read."""
        if request.response_format is not None:
            check_format(request.response_format)
        if self.tokenizer is not None and request.tokens is None:
            n = len(encode_text(self.tokenizer, request))
            refuse_beyond_context(n, self.plan.outline.config.context)
            if n >= self.context:
                raise ContextOverflow(n, self.context)

    def load(self, on_event: Callable[[EngineEvent], None] | None = None) -> Engine:
        if device.backend() == "cpu" and blas.slow():
            log.warning(f"BLAS: {blas.running()}")
        elif device.backend() == "cpu" and products_depend_on_rows():
            log.warning(ROWS_DIFFER.format(blas.running()))
        if device.backend() == "cpu" and not self.config.deterministic and (limited := blas.yield_to_others()):
            log.info(limited)
        if device.backend() == "cuda":  # before MLX computes anything
            announce_compiling(use_module_folder(cache_root() / "kernels", device.architecture()))
        with refuse_overflow(self.source.name):
            model = self._build()
        files = check_loaded(self.stamps, self.checkpoint.files()) if self.checkpoint is not None else ()
        source = replace(self.source, files=files)
        engine = Engine(model, adapt_config(self.config, model), self.tokenizer, source, on_event)
        if device.backend() == "cpu":
            device.release_cache()
        return engine

    def _build(self) -> CausalLM:
        if self.checkpoint is not None:
            plan = confirm_plan(self.plan, self.checkpoint, self.config)
            return build_model(self.checkpoint, self.config, plan.dequantise)
        assert self.shape is not None
        return build_random_model(self.shape, self.config)


def open_model(name: str, config: EngineConfig) -> OpenModel:
    """Find a model and read its headers. What cannot run is refused before a weight is read."""
    track_thread()  # it has used MLX even if no engine comes of it
    check_config(config, backend())
    resolved = resolve(str(name), revision=config.revision, offline=config.offline, token=config.token)
    if resolved.shape is not None:
        plan = plan_shape(resolved.shape, config)
        check_plan(plan, config)
        return OpenModel(config, plan, Source(resolved.name), shape=resolved.shape)
    assert resolved.path is not None
    before = stamp_files(resolved.path)
    checkpoint = open_checkpoint(resolved)
    plan = plan_checkpoint(checkpoint, config, suppose_kernels=True)
    check_plan(plan, config)
    tokenizer = open_tokenizer(checkpoint)
    eos, generation = find_eos_ids(checkpoint, tokenizer), tuple(checkpoint.generation.items())
    capabilities = tuple(find_capabilities(checkpoint.config).items())
    source = Source(resolved.name, eos=eos, generation=generation, capabilities=capabilities)
    return OpenModel(config, plan, source, tokenizer, checkpoint, stamps=before)


def adapt_config(config: EngineConfig, model: CausalLM) -> EngineConfig:
    """The config without what a model of another library cannot do."""
    if not model.is_adapter:
        return config
    if config.compile:
        log.warning("compile does not apply: mlx-lm's modules change their caches while they run")
    # Tokens launched ahead of an end could not be taken back out of such a cache: it would not be kept.
    ahead = config.ahead if all(spec.rewinds for spec in model.cache_specs() if isinstance(spec, ExternalKV)) else 0
    return replace(config, compile=False, ahead=ahead)


def open_checkpoint(resolved: ResolvedModel) -> Checkpoint:
    assert resolved.path is not None
    opened = FolderCheckpoint if resolved.kind == "folder" else GgufCheckpoint
    return opened(resolved.path, resolved.name)


def build_model(checkpoint: Checkpoint, config: EngineConfig, dequantise: bool | None = None) -> CausalLM:
    on_cpu = device.backend() == "cpu"
    dtype = DTYPES[config.dtype] if config.dtype else (mx.float32 if on_cpu else None)
    unpack = plan_checkpoint(checkpoint, config).dequantise if dequantise is None else dequantise
    by_kernels = not unpack and on_cpu and uses_cpu_kernels(checkpoint, config)
    if isinstance(checkpoint, GgufCheckpoint):
        stays = not unpack and not find(checkpoint.config).is_adapter
        checkpoint.k_quants = BLOCKS if by_kernels else SPLIT if stays and not on_cpu else UNPACKED
        if dtype == mx.float32:
            checkpoint.unpacked_dtype = dtype
    model = build(checkpoint, dtype=dtype, dequantise=unpack, keep_scales=by_kernels)
    if on_cpu and is_packed(checkpoint):
        how = "unpacked to" if unpack else "kept packed, computed in"
        log.info(f"{checkpoint.name}: weights {how} {config.dtype or 'float32'} on the CPU (option dequantise)")
    elif by_kernels:
        log.info(f"{checkpoint.name}: weights stay in 16 bits, computed in float32 on the CPU (option dequantise)")
    return prepare_model(model, config)


def build_random_model(shape: Shape, config: EngineConfig) -> CausalLM:
    dtype = compute_dtype(config.dtype, mx.bfloat16)
    family = find(shape.config)
    model = family(family.parse(shape.config))  # type: ignore[call-arg]
    random_weights(model, shape.bits, dtype, mode=shape.mode, group_size=shape.group_size)
    return prepare_model(model, config)


def prepare_model(model: CausalLM, config: EngineConfig) -> CausalLM:
    if model.dtype == mx.float32 and (reason := ask_for_exact_float32()):
        log.warning(f"float32 products are rounded as TF32 (11 bits) on this device: {reason}")
    folder = cache_root() / "kernels"
    gpu = make_gpu(backend(), folder=folder)
    cpu = open_cpu_kernels(config) if gpu is None and has_packed_layers(model) else None
    kernels = Kernels(config.kernels, gpu, cpu)
    verify_on_first_use(kernels, folder)
    model.fuse(kernels)
    count = 0 if cpu is None else pack_modules(model, kernels)
    if cpu is not None:
        widen_halves(model)
    packed = any(isinstance(m, Packed) and m.mode != "dense" for m in model.modules())
    if config.cpu_activations != "float32" and not packed:
        raise BadRequest("cpu_activations does not apply: no packed matrix of this model has a CPU kernel")
    if cpu is not None and count:
        rounded = ", activations rounded to 8 bits" if cpu.activations == "int8" else ""
        log.info(f"{count} matrices are computed by {cpu.vectors} kernels, threads: {cpu.threads}{rounded}")
    if device.backend() == "cpu":
        transpose_weights(model)
    mx.eval(model.parameters())
    return model


def transpose_weights(model: CausalLM) -> None:
    """Lay plain matrices out input by input: OpenBLAS multiplies one row by them 20 % faster, many rows as fast."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = mx.contiguous(module.weight.T).T  # same numbers, same shape
            mx.eval(module.weight)  # one at a time: both layouts exist together


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    try:
        tokenizer = checkpoint.tokenizer()
    except NoTokenizer:
        return None  # tokens in and out still work; text raises NoTokenizer where it is asked for
    tokenizer.chat_format.use_builtin()
    return tokenizer


def find_capabilities(config: dict[str, Any]) -> dict[str, Any]:
    """What a JANG pack declares of its model's answers."""
    for key in ("jang_config", "jang"):
        labels = config.get(key)
        found = labels.get("capabilities") if isinstance(labels, dict) else None
        if isinstance(found, dict):
            return {name: value for name, value in found.items() if isinstance(value, str)}
    return {}


def find_eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end an answer: those of generation_config.json, config.json and the tokenizer."""
    found: set[int] = set(tokenizer.eos_ids) if tokenizer else set()
    text = checkpoint.config.get("text_config")  # where wrappers keep what belongs to their language model
    for place in (checkpoint.generation, checkpoint.config, text if isinstance(text, dict) else {}):
        value = place.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool):
                found.add(token)
    return frozenset(found)
