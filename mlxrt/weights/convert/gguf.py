"""Writes a model as one GGUF file that llama.cpp opens too: weights, config, tokenizer and chat template inside.

A GGUF source keeps its metadata byte for byte, and tensors that have the wanted type already. Any other is read as our
own module has it. What GGUF cannot hold is refused before anything is written: the keys are read back first.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import BadCheckpoint, BadRequest, NoTokenizer, UnsupportedModel, quote
from ...models import find
from ...models.config import ModelConfig, suppress_reports
from ...models.rope import RopeParams, default_periods
from ..formats.checkpoint import Checkpoint
from ..formats.gguf.architecture_keys import rope_tensors
from ..formats.gguf.architectures import ARCHITECTURES
from ..formats.gguf.checkpoint import GgufCheckpoint, read_config
from ..formats.gguf.reader import GGUFTensor
from ..formats.gguf.splits import GGUFSet
from ..formats.gguf.writer import RawValue, TensorPlan, file_bytes, write_gguf
from ..load.build import read_native
from .convert import Converted, check_space, describe_files
from .gguf_blocks import encode, slice_rows
from .gguf_tensors import TensorSource
from .gguf_types import TypeMix, is_quantizable

log = logging.getLogger("mlxrt")

# model_type -> architecture: the table's own, and those that share one or are part of a multimodal model.
ARCHITECTURE_OF = {arch.model_type: name for name, arch in ARCHITECTURES.items()} | {
    "mistral": "llama", "mixtral": "llama", "gemma3": "gemma3", "gemma4": "gemma4", "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}  # fmt: skip
WINDOWS_IN_LLAMA_CPP = ("gemma2", "gemma3", "gemma4", "gpt-oss", "phi3")
QUANTIZATION_VERSION = 2
# Fields of a config that other fields, or the tensors, say as well.
REDUNDANT = {
    "model_type", "sliding_window", "use_sliding_window", "layer_types", "decoder_sparse_step", "mlp_only_layers",
    "full_attention_interval", "jang_norms_pre_shifted", "by_jang", "vocab_size_per_layer_input", "max_window_layers",
}  # fmt: skip


def convert_to_gguf(
    checkpoint: Checkpoint,
    path: Path,
    type_name: str,
    tokenizer: bool = True,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Write `checkpoint` as the new file `path`. `on_tensor` hears after each tensor how many weights are written."""
    if path.exists():
        raise BadRequest(f"{path} exists; give a new file")
    files = describe_files(checkpoint)
    if isinstance(checkpoint, GgufCheckpoint):
        metadata, tensors = plan_gguf(checkpoint, type_name, tokenizer)
    else:
        metadata, tensors = plan_model(checkpoint, type_name, tokenizer)
    check_space(path, file_bytes(metadata, tensors))
    report_types(type_name, tensors)
    write_gguf(path, metadata, tensors, on_tensor)
    if describe_files(checkpoint) != files:
        path.unlink()
        raise BadCheckpoint(f"{checkpoint.path} changed while it was converted; start again")
    return Converted(path, sum(tensor.count for tensor in tensors), sum(tensor.nbytes for tensor in tensors))


def report_types(type_name: str, tensors: Sequence[TensorPlan]) -> None:
    """A line where rows are too narrow for the blocks of the type."""
    types = Counter(tensor.ggml_type for tensor in tensors if is_quantizable(tensor.name, tensor.shape))
    if len(types) > 1:
        log.info(f"{type_name}: " + ", ".join(f"{count} {name}" for name, count in types.most_common()))


# From GGUF


def plan_gguf(checkpoint: GgufCheckpoint, type_name: str, tokenizer: bool) -> tuple[dict[str, Any], list[TensorPlan]]:
    source = checkpoint.file
    config, kept = checkpoint.config, dict(source.tensors)
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    experts = config.get("num_experts") or 0
    mix = TypeMix(
        type_name,
        config["num_hidden_layers"],
        config["num_attention_heads"] // kv_heads,
        experts,
        tied="output.weight" not in kept,
    )
    metadata: dict[str, Any] = {}
    for key in source.metadata:
        if not key.startswith("split.") and (tokenizer or not key.startswith("tokenizer.")):
            metadata[key] = RawValue(source.files[0].value_bytes(key))
    metadata.pop("general.alignment", None)
    metadata |= {"general.file_type": mix.file_type, "general.quantization_version": QUANTIZATION_VERSION}
    return metadata, [plan_tensor(source, tensor, mix) for tensor in kept.values()]


def plan_tensor(source: GGUFSet, tensor: GGUFTensor, mix: TypeMix) -> TensorPlan:
    kind = mix.choose(tensor.name, tensor.shape) if is_quantizable(tensor.name, tensor.shape) else tensor.ggml_type
    parts = copy_tensor if kind == tensor.ggml_type else encode_tensor
    return TensorPlan(tensor.name, tensor.shape, kind, lambda: parts(source, tensor, kind))


def copy_tensor(source: GGUFSet, tensor: GGUFTensor, kind: str) -> Iterator[np.ndarray]:
    yield source.tensor_bytes(tensor)
    source.release_pages()


def encode_tensor(source: GGUFSet, tensor: GGUFTensor, kind: str) -> Iterator[np.ndarray]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = source.tensor_bytes(tensor).reshape(math.prod(tensor.shape[:-1]), -1)
    for part in slice_rows(len(rows), tensor.shape[-1]):
        try:
            values = dequantize(rows[part], GGMLQuantizationType[tensor.ggml_type])
        except (NotImplementedError, KeyError):
            raise UnsupportedModel(
                f"{quote(tensor.name)} has the GGUF type {tensor.ggml_type}, which PyPI's gguf cannot unpack"
            ) from None
        yield from encode(tensor.name, values.astype(np.float32, copy=False), kind)
    source.release_pages()


# From anything else


def plan_model(checkpoint: Checkpoint, type_name: str, tokenizer: bool) -> tuple[dict[str, Any], list[TensorPlan]]:
    name = find_architecture(checkpoint)
    arch, family = ARCHITECTURES[name], find(checkpoint.config)
    with suppress_reports():
        native = read_native(family, checkpoint, mx.float32)  # what has to be unpacked at once is not rounded
    config = native.model.config
    text = checkpoint.config.get("text_config")
    settings = config.rope_settings(text if isinstance(text, Mapping) else checkpoint.config)
    mix = TypeMix(
        type_name,
        config.num_hidden_layers,
        config.num_attention_heads // config.num_key_value_heads,
        getattr(config, "num_experts", None) or 0,
        tied=config.tie_word_embeddings,
    )
    keys = arch.write_keys(config, settings)
    warn_of_windows(name, keys)
    general = {"architecture": name, "type": "model", "name": Path(checkpoint.name).name}
    metadata: dict[str, Any] = {f"general.{key}": value for key, value in general.items()}
    metadata |= {"general.file_type": mix.file_type, "general.quantization_version": QUANTIZATION_VERSION}
    metadata |= {f"{name}.{key}": value for key, value in keys.items()}
    source, ropes = TensorSource(native, arch), rope_tensors(config, settings)
    infos = {t.name: GGUFTensor(t.name, t.shape, "F32", 0, 0) for t in source.file_tensors()}
    infos |= {key: GGUFTensor(key, array.shape, "F32", 0, 0) for key, array in ropes.items()}
    written = read_config(metadata, infos, lambda key, _: ropes[key].tolist(), checkpoint.name)
    check_config(family, config, written, name)
    if tokenizer:
        metadata |= make_tokenizer(checkpoint, config, metadata)
    return metadata, [plan_plain(key, array) for key, array in ropes.items()] + source.plan(mix, written)


def plan_plain(name: str, array: np.ndarray) -> TensorPlan:
    return TensorPlan(name, array.shape, "F32", lambda: (array,))


def find_architecture(checkpoint: Checkpoint) -> str:
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURE_OF:
        known = ", ".join(sorted(ARCHITECTURE_OF))
        raise UnsupportedModel(f"{quote(kind)} cannot be written as GGUF; these can: {known}")
    return ARCHITECTURE_OF[kind]


def warn_of_windows(arch: str, keys: Mapping[str, Any]) -> None:
    size = keys.get("attention.sliding_window")
    if size and arch not in WINDOWS_IN_LLAMA_CPP:
        log.warning(
            f"the model has windows of {size} tokens, which llama.cpp does not read in {arch} files: it "
            "answers differently beyond them"
        )


def make_tokenizer(checkpoint: Checkpoint, config: ModelConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer's keys; none, with a line, where the folder has no tokenizer."""
    from ...text.folder_to_gguf import check_alike, strips_space, tokenizer_metadata
    from ...text.gguf_vocab import is_phi3

    text = checkpoint.config.get("text_config")
    given = [place.get("eos_token_id") for place in (checkpoint.generation, checkpoint.config, text or {})]
    stops = [i for value in given for i in (value if isinstance(value, list) else [value]) if type(i) is int]
    try:
        chars = metadata["general.architecture"] == "gemma4"
        found = tokenizer_metadata(checkpoint.path, config.vocab_size, stops, chars=chars)
    except NoTokenizer:
        log.warning(f"{checkpoint.name} holds no tokenizer: neither will the file, and llama.cpp will not open it")
        return {}
    is_phi = metadata["general.architecture"] == "phi3"
    if is_phi and strips_space(checkpoint.path) and not is_phi3(checkpoint.name):  # known by the model's name alone
        found["general.name"] = f"Phi-3 {Path(checkpoint.name).name}"
    check_alike(checkpoint.path, {**metadata, **found})
    return found


def check_config(family: Any, config: ModelConfig, written: Mapping[str, Any], arch: str) -> None:
    """Refuse a model that a reader of the keys would take for another."""
    with suppress_reports():
        read = family.parse({**written, "model_type": config.model_type or written["model_type"]})
    for name, ours in describe(config).items():
        if not same(ours, theirs := describe(read).get(name)):
            raise UnsupportedModel(f"{arch} files of GGUF cannot hold {name} = {quote(ours)}: it would be {theirs}")


def describe(config: ModelConfig) -> dict[str, Any]:
    """What decides the arithmetic, in one spelling."""
    found = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in REDUNDANT}
    found["sparse"] = [config.has_experts(i) for i in range(config.num_hidden_layers)]
    return found | {"context": config.context}


def same(a: Any, b: Any) -> bool:
    """Equal, numbers as far as float32 goes."""
    if isinstance(a, RopeParams) and isinstance(b, RopeParams):
        return same(rope_values(a), rope_values(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-5)
    return a == b


def rope_values(rope: RopeParams) -> list[Any]:
    periods = rope.periods or default_periods(rope.theta, rope.dim)
    return [rope.dim, rope.scale, rope.magnitude, rope.limit, *map(float, periods)]
