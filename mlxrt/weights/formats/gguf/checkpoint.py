"""A GGUF file as a checkpoint: tensors under Hugging Face names, metadata as config and tokenizer."""

import logging
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ....errors import BadCheckpoint, NoTokenizer, UnsupportedModel, quote
from ...progress import track
from ..checkpoint import Checkpoint, TensorInfo
from .architectures import ARCHITECTURES
from .config import build_config
from .reader import GGUFTensor, read_gguf
from .tensors import PLAIN, convert, needs_dequantizing, stays_blocks, stored_rows, unpermute

log = logging.getLogger("mlxrt")

if TYPE_CHECKING:
    from ....text import Tokenizer

MAX_MAPPED = 1 << 26  # bytes of the file that are in memory beside the arrays made of them
ROPE_FREQS = "rope_freqs.weight"  # llama3's scaling as one factor per RoPE pair


class GgufCheckpoint(Checkpoint):
    """One .gguf file. `metadata` has plain Python values."""

    def __init__(self, path: Path | str, name: str | None = None):
        self.path = Path(path)
        self.name = name or self.path.stem
        self.file = read_gguf(self.path)
        self.metadata: dict[str, Any] = self.file.metadata
        refuse_splits(self.path, self.metadata)
        self.config = build_config(self.metadata, self.file.tensors)
        self.arch = ARCHITECTURES[self.metadata["general.architecture"]]
        self.generation: dict[str, Any] = {}
        self.keep_k_quants = False  # set before `load` where something computes with their blocks
        if self.has_rope_freqs():
            self.config["rope_freq_factors"] = self.rope_freqs()

    def sizes(self) -> dict[str, TensorInfo]:
        return {self.arch.rename(r.name): TensorInfo(r.shape, r.ggml_type, r.nbytes) for r in self.tensors()}

    def has_rope_freqs(self) -> bool:
        """Where layers have different RoPE bases they are ambiguous; then the tensor is reported as unexpected."""
        return ROPE_FREQS in self.file.tensors and self.arch.local_rope_theta is None

    def tensors(self) -> list[GGUFTensor]:
        return [r for r in self.file.tensors.values() if r.name != ROPE_FREQS or not self.has_rope_freqs()]

    def load(self) -> dict[str, mx.array]:
        tensors: Iterable[GGUFTensor] = self.tensors()
        if slow := Counter(r.ggml_type for r in tensors if needs_dequantizing(r) and not self.stays(r)):
            types = ", ".join(f"{count} {name}" for name, count in slow.most_common())
            log.info(f"{self.name}: unpacking {types} to float16")
            tensors = track(list(tensors), "dequantising")
        arrays: dict[str, mx.array] = {}
        mapped = 0
        for tensor in tensors:
            mapped += tensor.nbytes
            if mapped > MAX_MAPPED:
                self.file.release_pages()
                mapped = 0
            for key, array in convert(tensor, self.rows(tensor), self.keep_k_quants).items():
                name = self.arch.rename(key)
                if self.arch.norm_plus_one and name.endswith("norm.weight"):
                    array = array.astype(mx.float32) - 1
                if name in arrays:
                    raise BadCheckpoint(f"two tensors of {self.path} are {name}; one of them is {quote(tensor.name)}")
                arrays[name] = array
        self.file.release_pages()
        return arrays

    def stays(self, tensor: GGUFTensor) -> bool:
        return self.keep_k_quants and stays_blocks(tensor)

    def rows(self, tensor: GGUFTensor) -> np.ndarray:
        rows = stored_rows(self.file, tensor)
        if not self.arch.permutes_qk:
            return rows
        found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", tensor.name)
        if not found:
            return rows
        if len(tensor.shape) != (2 if found[2] == "weight" else 1) or (
            found[2] == "bias" and tensor.ggml_type not in PLAIN
        ):
            raise BadCheckpoint(f"{tensor.name} is {tensor.ggml_type} {list(tensor.shape)}, not a matrix or plain bias")
        heads = self.config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        if tensor.shape[0] != heads * self.config["head_dim"]:
            raise BadCheckpoint(
                f"{tensor.name} has {tensor.shape[0]} rows, expected {heads} heads x {self.config['head_dim']}"
            )
        by_row = rows.reshape(tensor.shape[0], -1)  # a bias is one stored row
        return unpermute(by_row, heads).reshape(rows.shape)

    def rope_freqs(self) -> list[float]:
        tensor = self.file.tensors[ROPE_FREQS]
        if tensor.ggml_type != "F32" or tensor.shape != (self.config["head_dim"] // 2,):
            raise BadCheckpoint(
                f"{ROPE_FREQS} must be F32 [{self.config['head_dim'] // 2}], found {tensor.ggml_type} "
                f"{list(tensor.shape)}"
            )
        factors = stored_rows(self.file, tensor).view("<f4")[0].tolist()
        if not all(0 < f < float("inf") for f in factors):
            raise BadCheckpoint(f"{ROPE_FREQS} must hold finite values > 0")
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
        return [self.path]


def refuse_splits(path: Path, metadata: dict[str, Any]) -> None:
    count = metadata.get("split.count", 0)
    if count not in (0, 1):
        raise UnsupportedModel(f"{path} is one of {quote(count)} splits; merge them with `llama-gguf-split --merge`")
