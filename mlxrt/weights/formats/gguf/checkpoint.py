"""A GGUF file as a checkpoint: tensors under Hugging Face names, metadata as config and tokenizer."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ....errors import BadCheckpoint, NoTokenizer, UnsupportedModel, quote
from ...progress import track
from ..checkpoint import Checkpoint, TensorInfo
from .architecture_configs import phi3_rope
from .architectures import ARCHITECTURES
from .config import build_config
from .metadata import ArchMetadata
from .names import layer_of
from .reader import GGUFTensor
from .reorder import take_columns, take_rows
from .splits import read_gguf_set
from .tensors import UNPACKED, convert, dequantize, needs_dequantizing, stays_k_quant, stored_rows

log = logging.getLogger("mlxrt")

if TYPE_CHECKING:
    from ....text import Tokenizer

MAX_MAPPED = 1 << 24  # bytes of the file that are in memory beside the arrays made of them
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # Phi-3's, up to a context
ROPE_FREQS = "rope_freqs.weight"  # llama3's scaling as one factor per RoPE pair


class GgufCheckpoint(Checkpoint):
    """One .gguf file, or the files of a set. `metadata` has plain Python values."""

    def __init__(self, path: Path | str, name: str | None = None):
        self.path = Path(path)
        self.name = name or self.path.stem
        self.file = read_gguf_set(self.path)
        self.metadata: dict[str, Any] = self.file.metadata
        self.config = read_config(self.metadata, self.file.tensors, self.rope_factors, str(self.path))
        self.arch = ARCHITECTURES[self.metadata["general.architecture"]]
        self.generation: dict[str, Any] = {}
        self.k_quants = UNPACKED  # or set before `load`, where kernels compute with them
        self.unpacked_dtype = mx.float16  # or float32, set before `load`, where that is computed in

    def sizes(self) -> dict[str, TensorInfo]:
        return {self.arch.rename(r.name): TensorInfo(r.shape, r.ggml_type, r.nbytes) for r in self.tensors()}

    def has_rope_freqs(self) -> bool:
        """Where layers have different RoPE bases they are ambiguous; then the tensor is reported as unexpected."""
        return ROPE_FREQS in self.file.tensors and self.arch.rope_factors is not None

    def tensors(self) -> list[GGUFTensor]:
        """Those of the model: not RoPE's factors, which are in the config, nor layers that predict further tokens."""
        depth = self.config["num_hidden_layers"]
        found = [r for r in self.file.tensors.values() if (layer_of(r.name) or 0) < depth or not self.has_drafts]
        factors = {SHORT_FACTORS, LONG_FACTORS} if self.arch.long_rope else set()
        factors |= {ROPE_FREQS} if self.has_rope_freqs() else set()
        return [r for r in found if r.name not in factors]

    @property
    def has_drafts(self) -> bool:
        return bool(self.metadata.get(f"{self.metadata['general.architecture']}.nextn_predict_layers"))

    def load(self) -> dict[str, mx.array]:
        tensors: Iterable[GGUFTensor] = self.tensors()
        if slow := [r for r in tensors if needs_dequantizing(r) and not self.stays(r)]:
            types = ", ".join(f"{count} {name}" for name, count in Counter(r.ggml_type for r in slow).most_common())
            stored, dtype = sum(r.nbytes for r in slow), self.unpacked_dtype
            needed = dtype.size * sum(math.prod(r.shape) for r in slow)
            sizes = f"{stored / 1e6:.1f} MB of the file become {needed / 1e6:.1f} MB"
            log.info(f"{self.name}: unpacking {types} to {'float32' if dtype == mx.float32 else 'float16'}: {sizes}")
            tensors = track(list(tensors), "dequantising")
        arrays: dict[str, mx.array] = {}
        mapped = 0
        for tensor in tensors:
            mapped += tensor.nbytes
            if mapped > MAX_MAPPED:
                self.file.release_pages()
                mapped = 0
            for key, array in self.convert(tensor).items():
                name = self.arch.rename(key)
                array = restore_values(name, array, self.arch.norm_plus_one)
                if name in arrays:
                    raise BadCheckpoint(f"two tensors of {self.path} are {name}; one of them is {quote(tensor.name)}")
                arrays[name] = array
        self.file.release_pages()
        return arrays

    def stays(self, tensor: GGUFTensor) -> bool:
        return stays_k_quant(tensor, self.k_quants) and not self.splits_blocks(tensor)

    def splits_blocks(self, tensor: GGUFTensor) -> bool:
        """Whether its columns must be moved and blocks are larger than what moves together."""
        order = self.arch.column_order(tensor, self.config)
        return order is not None and take_columns(tensor, stored_rows(self.file, tensor)[:1], order) is None

    def convert(self, tensor: GGUFTensor) -> dict[str, mx.array]:
        """The arrays of one tensor, its rows and columns where the model has them."""
        rows = stored_rows(self.file, tensor)
        if (order := self.arch.row_order(tensor, self.config)) is not None:
            rows = take_rows(tensor, rows, order)
        if (order := self.arch.column_order(tensor, self.config)) is not None:
            moved = take_columns(tensor, rows, order)
            if moved is None:
                return {tensor.name: dequantize(tensor, rows, self.unpacked_dtype)[:, mx.array(order)]}
            rows = moved
        return convert(tensor, rows, self.k_quants, self.unpacked_dtype)

    def rope_factors(self, name: str, config: Mapping[str, Any]) -> list[float]:
        tensor = self.file.tensors[name]
        sizes = [own["head_dim"] for own in config.get("per_layer_config", {}).values()]  # Gemma 4's
        pairs = max([config.get("rotary_dim", config["head_dim"]), *sizes]) // 2
        if tensor.ggml_type != "F32" or tensor.shape != (pairs,):
            raise BadCheckpoint(f"{name} must be F32 [{pairs}], found {tensor.ggml_type} {list(tensor.shape)}")
        factors = stored_rows(self.file, tensor).view("<f4")[0].tolist()
        if not all(0 < f < float("inf") for f in factors):
            raise BadCheckpoint(f"{name} must hold finite values > 0")
        return factors

    def tokenizer(self) -> "Tokenizer":
        from ....text import Tokenizer

        if "tokenizer.ggml.model" not in self.metadata:
            raise NoTokenizer(f"{self.path} holds no tokenizer (no tokenizer.ggml.model); give token ids, not text")
        return Tokenizer.from_gguf(self.metadata)

    def save_tokenizer(self, folder: Path) -> None:
        from ....text.gguf_to_json import write_tokenizer

        if "tokenizer.ggml.model" not in self.metadata:
            log.warning(f"{self.name} holds no tokenizer: neither will {folder.name}")
        elif not write_tokenizer(folder, self.metadata):
            raise UnsupportedModel(
                f"{self.name}: its vocabulary cannot be written as tokenizer.json; convert from the original folder, "
                "or leave the tokenizer out (--no-tokenizer) and copy its files"
            )

    def files(self) -> list[Path]:
        return [file.path for file in self.file.files]


def read_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GGUFTensor],
    factors: Callable[[str, Mapping[str, Any]], list[float]],
    path: str,
) -> dict[str, Any]:
    """The config.json of a file; `factors` reads RoPE's, which are tensors, by name and what is known of the config."""
    config = build_config(metadata, tensors)
    name = metadata["general.architecture"]
    arch = ARCHITECTURES[name]
    if arch.long_rope and SHORT_FACTORS in tensors:
        phi3_rope(ArchMetadata(metadata, name), config, factors(SHORT_FACTORS, config))
    if ROPE_FREQS in tensors and arch.rope_factors:
        arch.rope_factors(config, factors(ROPE_FREQS, config))
    elif arch.needs_rope_factors:
        raise BadCheckpoint(f"{path} has no {ROPE_FREQS}, which its architecture needs; convert it again")
    return config


def restore_values(name: str, array: mx.array, norm_plus_one: bool) -> mx.array:
    """The numbers as Hugging Face stores them."""
    if norm_plus_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return array.astype(mx.float32) - 1
    if name.endswith("linear_attn.A_log"):  # stored as what the state decays by
        if not (array < 0).all().item():
            raise BadCheckpoint(f"{quote(name)} must be stored as numbers below 0; download it again")
        return mx.log(-array.astype(mx.float32))
    if name.endswith("shared_expert_gate.weight") and array.ndim == 1:
        return array[None]
    return array
