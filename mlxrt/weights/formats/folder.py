"""A checkpoint folder of the hub or mlx-lm: config.json, safetensors shards with an index, tokenizer files."""

import re
import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ...errors import BadCheckpoint, ModelNotFound, UnsupportedModel, quote
from ..json_object import read_json
from . import codebook
from .checkpoint import Checkpoint, TensorInfo
from .fp8 import SCALE
from .jang import labels as jang
from .safetensors import read_header

if TYPE_CHECKING:
    from ...text import Tokenizer

INDEX = "model.safetensors.index.json"
INDEXES = (INDEX, "model.jang.index.json", "model.jjqf.index.json", "model.mxq.index.json")  # the others: JANG 1
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class FolderCheckpoint(Checkpoint):
    """A local folder. Headers are read and checked on first use."""

    def __init__(self, path: Path | str, name: str | None = None):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelNotFound(f"{self.path}: no such folder")
        self.name = name or self.path.resolve().name
        self.config = read_json(self.path / "config.json") | self.read_labels()
        generation = self.path / "generation_config.json"
        self.generation = read_json(generation) if generation.exists() else {}

    def read_labels(self) -> dict[str, Any]:
        """The JANG and codebook configs beside config.json, under the keys they have inside it."""
        labels = {}
        if name := next((name for name in jang.FILES if (self.path / name).is_file()), None):
            labels[jang.EMBEDDED[0]] = read_json(self.path / name)
        if (self.path / codebook.CONFIG).is_file():
            labels[codebook.CONFIG_KEY] = read_json(self.path / codebook.CONFIG)
        return labels

    @cached_property
    def shards(self) -> dict[str, dict[str, TensorInfo]]:
        """File name -> its tensors, from checked headers."""
        weight_map = read_index(self.path)
        names = sorted(set(weight_map.values())) or find_weights(self.path)
        shards = {name: read_header(self.path / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in shards[name]:
                raise BadCheckpoint(f"{self.path / find_index(self.path)}: {quote(tensor)} is not in {name}")
        return shards | {name: self.codebook_header(name) for name in self.codebook_files() if name not in shards}

    def codebook_files(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("codebook-layer-*") if codebook.FILE.fullmatch(path.name))

    def codebook_header(self, file: str) -> dict[str, TensorInfo]:
        infos = read_header(self.path / file)
        names = codebook.tensor_names(file, {name: info.shape for name, info in infos.items()})
        return {names[name]: info for name, info in infos.items()}

    def sizes(self) -> dict[str, TensorInfo]:
        sizes: dict[str, TensorInfo] = {}
        for name, tensors in self.shards.items():
            if twice := sizes.keys() & tensors.keys():
                raise BadCheckpoint(f"{self.path / name}: {quote(min(twice))} is in another shard too")
            sizes |= tensors
        return sizes

    def load(self) -> dict[str, mx.array]:
        sizes = self.sizes()
        for tensor, info in sizes.items():
            if info.dtype == "F8_E4M3" and (tensor + SCALE in sizes or f"{tensor}_scale" in sizes):
                continue
            if info.dtype.startswith(("F8", "F6", "F4")):
                raise UnsupportedModel(f"{quote(tensor)} is stored as {info.dtype}, which mlxrt does not read yet")
            if info.dtype in ("F64", "C64"):
                raise UnsupportedModel(f"{quote(tensor)} is stored as {info.dtype}; convert it to F32, F16 or BF16")
        arrays: dict[str, mx.array] = {}
        for name in self.shards:
            found = self.load_file(name)
            if codebook.FILE.fullmatch(name):
                names = codebook.tensor_names(name, {key: array.shape for key, array in found.items()})
                found = {names[key]: array for key, array in found.items()}
            arrays |= found
        return arrays

    def load_file(self, name: str) -> dict[str, mx.array]:
        """The tensors of one file."""
        try:
            return cast(dict[str, mx.array], mx.load(str(self.path / name)))
        except RuntimeError as bad:  # sound for the safetensors library, not for MLX
            raise BadCheckpoint(f"{self.path / name}: MLX refuses the file ({bad})") from None

    def load_sidecar(self, name: str) -> dict[str, mx.array] | None:
        if not (self.path / name).is_file():
            return None
        read_header(self.path / name)
        return self.load_file(name)

    def tokenizer(self) -> "Tokenizer":
        from ...text import Tokenizer

        return Tokenizer.from_folder(self.path)

    def save_tokenizer(self, folder: Path) -> None:
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, folder / name)

    def files(self) -> list[Path]:
        others = ("config.json", "generation_config.json", *INDEXES, *jang.FILES, codebook.CONFIG, *TOKENIZER_FILES)
        return [self.path / n for n in (*others, *self.shards) if (self.path / n).is_file()]


def find_index(folder: Path) -> str:
    """The name of a folder's index; the standard one where there is none."""
    return next((name for name in INDEXES if (folder / name).exists()), INDEX)


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> shard; empty when there is a single file."""
    index = folder / find_index(folder)
    if not index.exists():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index}: weight_map must be an object of tensor -> file")
    for shard in weight_map.values():
        # Plain names only: an index must not make us read outside its folder.
        if not isinstance(shard, str) or not re.fullmatch(r"[\w][\w.+-]*\.safetensors", shard):
            raise BadCheckpoint(f"{index}: {quote(shard)} is not the name of a safetensors file")
    shards = set(weight_map.values())
    if SINGLE not in shards and (folder / SINGLE).is_file():
        return {}  # a stale index, from before the shards were merged; Hugging Face takes the single file too
    if missing := sorted(s for s in shards if not (folder / s).is_file()):
        raise BadCheckpoint(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}; download them"
        )
    return weight_map


def find_weights(folder: Path) -> list[str]:
    """The weight files of a folder without a usable index."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    for pattern in ("model-*.safetensors", "weights.*.safetensors"):  # the second: older mlx-lm
        if names := sorted(p.name for p in folder.glob(pattern)):
            check_complete(folder, names)
            return names
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise UnsupportedModel(f"{folder}: holds PyTorch pickles only, which can run code; convert them to safetensors")
    raise BadCheckpoint(f"{folder}: no weights; expected {SINGLE}, or shards with {INDEX}")


def check_complete(folder: Path, names: list[str]) -> None:
    """Check that shards named -00001-of-00003 are all there."""
    for name in names:
        found = re.search(r"-\d{1,5}-of-(\d{1,5})(?:\.jang|\.jjqf|\.mxq)?\.safetensors$", name)
        if found and int(found[1]) != len(names):
            raise BadCheckpoint(f"{folder}: {len(names)} of {int(found[1])} shards are here; download the others")
