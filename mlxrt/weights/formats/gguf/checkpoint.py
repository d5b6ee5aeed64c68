"""A GGUF file as a checkpoint: its tensors under Hugging Face names, its metadata as config and tokenizer.

Refuses to know the byte layout (gguf_directory, gguf_tensors), what the metadata keys mean (gguf_config) and what the
architectures are like (gguf_families).
"""

import logging
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ....errors import BadCheckpoint, NoTokenizer, UnsupportedModel, shown
from ..checkpoint import Checkpoint, TensorInfo
from .config import synthesise
from .families import FAMILIES
from .header import TensorRecord, read_directory
from .tensors import PLAIN, convert, needs_dequantising, stored_rows, unpermute

log = logging.getLogger("mlxrt")

if TYPE_CHECKING:
    from ....text import Tokenizer

FREQUENCIES = "rope_freqs.weight"  # llama3's scaling, already turned into one factor per rope pair


PROBE = "It's 3,141 — naïve  <s>日本\n\n  def f(x):\treturn 'ok'"  # on which two tokenizers that differ do differ


class GgufCheckpoint(Checkpoint):
    """One .gguf file. `metadata` holds its keys as plain Python values."""

    def __init__(self, path: Path | str, name: str | None = None):
        self.path = Path(path)
        self.name = name or self.path.stem
        self.directory = read_directory(self.path)
        self.metadata: dict[str, Any] = self.directory.metadata
        refuse_parts(self.path, self.metadata)
        self.config = synthesise(self.metadata, self.directory.tensors)
        self.family = FAMILIES[self.metadata["general.architecture"]]
        self.generation: dict[str, Any] = {}
        if self.has_factors():
            self.config["rope_freq_factors"] = self.frequency_factors()

    def sizes(self) -> dict[str, TensorInfo]:
        return {self.family.rename(r.name): TensorInfo(r.shape, r.kind, r.nbytes) for r in self.records()}

    def has_factors(self) -> bool:
        """Where layers turn differently they would say nothing: they are then left over."""
        return FREQUENCIES in self.directory.tensors and self.family.local_base is None

    def records(self) -> list[TensorRecord]:
        return [r for r in self.directory.tensors.values() if r.name != FREQUENCIES or not self.has_factors()]

    def load(self) -> dict[str, mx.array]:
        records: Iterable[TensorRecord] = self.records()
        if slow := Counter(r.kind for r in records if needs_dequantising(r)):
            kinds = ", ".join(f"{count} {kind}" for kind, count in slow.most_common())
            log.info(
                f"{self.name}: MLX has no kernel for these GGUF kinds: {kinds}; dequantising them to float16 on the CPU"
            )
            records = watched(records)
        arrays: dict[str, mx.array] = {}
        for record in records:
            for key, array in convert(record, self.rows(record)).items():
                name = self.family.rename(key)
                if self.family.adds_one and name.endswith("norm.weight"):
                    array = array.astype(mx.float32) - 1
                if name in arrays:
                    raise BadCheckpoint(f"two tensors of {self.path} are {name}; one of them is {shown(record.name)}")
                arrays[name] = array
        return arrays

    def rows(self, record: TensorRecord) -> np.ndarray:
        rows = stored_rows(self.directory, record)
        if not self.family.permutes:
            return rows
        found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", record.name)
        if not found:
            return rows
        if len(record.shape) != (2 if found[2] == "weight" else 1) or (found[2] == "bias" and record.kind not in PLAIN):
            raise BadCheckpoint(
                f"{record.name} is {record.kind} {list(record.shape)}, expected a matrix or a plain bias"
            )
        heads = self.config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        if record.shape[0] != heads * self.config["head_dim"]:
            raise BadCheckpoint(
                f"{record.name} has {record.shape[0]} rows, expected {heads} heads x {self.config['head_dim']}"
            )
        by_row = rows.reshape(record.shape[0], -1)  # a bias is one stored row of many elements
        return unpermute(by_row, heads).reshape(rows.shape)

    def frequency_factors(self) -> list[float]:
        record = self.directory.tensors[FREQUENCIES]
        if record.kind != "F32" or record.shape != (self.config["head_dim"] // 2,):
            raise BadCheckpoint(
                f"{FREQUENCIES} must be F32 [{self.config['head_dim'] // 2}], found {record.kind} {list(record.shape)}"
            )
        factors = stored_rows(self.directory, record).view("<f4")[0].tolist()
        if not all(0 < f < float("inf") for f in factors):
            raise BadCheckpoint(f"{FREQUENCIES} must hold finite numbers > 0")
        return factors

    def tokenizer(self) -> "Tokenizer":
        from ....text import Tokenizer

        if "tokenizer.ggml.model" not in self.metadata:
            raise NoTokenizer(
                f"{self.path} holds no tokenizer (no key tokenizer.ggml.model); give token ids instead of text"
            )
        return Tokenizer.from_gguf(self.metadata)

    def save_tokenizer(self, folder: Path) -> None:
        from ....text import Tokenizer
        from ....text.gguf_vocab import write_folder

        same = "tokenizer.ggml.model" in self.metadata and write_folder(folder, self.metadata)
        if same and Tokenizer.from_folder(folder).encode(PROBE) == self.tokenizer().encode(PROBE):
            return
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink(missing_ok=True)
        log.warning(
            f"{self.name}: its vocabulary has no form as tokenizer.json; copy the original's tokenizer files beside"
        )

    def files(self) -> list[Path]:
        return [self.path]


def refuse_parts(path: Path, metadata: dict[str, Any]) -> None:
    parts = metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise UnsupportedModel(
            f"{path} is one of {shown(parts)} parts; join them with `llama-gguf-split --merge` first"
        )


def watched(records: Iterable[TensorRecord]) -> Iterable[TensorRecord]:
    """The records behind a progress bar, where somebody looks."""
    if not sys.stderr.isatty():
        return records
    from rich.console import Console
    from rich.progress import track

    return track(list(records), "dequantising", console=Console(stderr=True), transient=True)
