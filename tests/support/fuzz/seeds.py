"""The sound files the fuzzer damages: a tiny model folder and GGUF files, each with a working tokenizer."""

import json
import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from mlxrt.weights.formats.gguf.reader import GGML_TYPES, read_gguf
from tests.support.llama_cpp_files import convert
from tests.support.tiny_files import CONFIG, add_tensor, float_weights, write_folder, write_gguf

SMALL = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "vocab_size": 320,
    "eos_token_id": [1, 2],
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
MESSAGES = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}<s>{% endif %}"
TEXT = "the quick brown fox jumps over the lazy dog, then the dog sleeps in the sun. Ünïcode 日本 1234."
FIXTURES = Path(__file__).parents[2] / "parity"
IDS = {name: number for number, (name, _, _) in GGML_TYPES.items()}


def seed_folder(folder: Path) -> dict[str, bytes]:
    """Packed and plain matrices, an index, a byte-level BPE tokenizer with a chat template."""
    arrays = {name: mx.array(value) for name, value in float_weights(SMALL).items()}
    for path, mode, group in (("lm_head", "affine", 32), ("model.layers.0.mlp.up_proj", "mxfp4", 32)):
        parts = mx.quantize(arrays[f"{path}.weight"], group, 4, mode)
        arrays |= {f"{path}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}
    write_folder(folder, arrays, SMALL | {"quantization": {"bits": 4, "group_size": 32, "mode": "affine"}})
    index = {"metadata": {}, "weight_map": dict.fromkeys(arrays, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9, "eos_token_id": [1]}')
    write_tokenizer(folder)
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator([TEXT], trainer)
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tok.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    settings |= {"add_bos_token": True, "model_max_length": 64, "chat_template": TEMPLATE}
    settings |= {"added_tokens_decoder": {"1": {"content": "<s>", "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def seed_gguf(folder: Path, arch: str) -> bytes:
    """llama: Q4_0 with byte-level BPE; qwen3: F16 and a K-quant with a SentencePiece vocabulary."""
    config = SMALL | {"model_type": arch, "hidden_size": 256 if arch == "qwen3" else 64}
    weights = float_weights(config)
    kind = "Q4_0" if arch == "llama" else "F16"

    def extra(writer) -> None:
        (byte_level if arch == "llama" else sentencepiece)(writer, folder)
        writer.add_chat_template(TEMPLATE)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if arch == "qwen3":
            del weights["lm_head.weight"]
            raw = np.full((320, 210), 20, np.uint8)
            writer.add_tensor("output.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
        else:
            add_tensor(writer, "rope_freqs.weight", np.ones(8, np.float32), "F32")

    return write_gguf(folder / f"{arch}.gguf", weights, config, kind, extra).read_bytes()


def seed_fixture(folder: Path, arch: str) -> bytes:
    """A parity fixture as llama.cpp would write it, its vocabulary made as long as the tokenizer's."""
    place = folder / arch
    place.mkdir()
    config = json.loads((FIXTURES / arch / "config.json").read_text()) | {"vocab_size": 320, "swiglu_alpha": 1.702}
    (place / "config.json").write_text(json.dumps(config))
    arrays = mx.load(str(FIXTURES / arch / "model.safetensors"))
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & arrays.keys():
        arrays[name] = mx.tile(arrays[name], (5, 1))  # 64 rows each time
    mx.save_safetensors(str(place / "model.safetensors"), arrays)
    extra = partial(sentencepiece, folder=folder)
    return convert(place, folder / f"{arch}.gguf", extra=extra).read_bytes()


def byte_level(writer, folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])


def sentencepiece(writer, folder: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "t", "h", "e", "th", "the", "▁the"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-i) for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 7])


class Gguf:
    """A GGUF file as a tree that can be edited, and back to bytes."""

    def __init__(self, blob: bytes):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.gguf"
            path.write_bytes(blob)
            parsed = read_gguf(path)
        self.start = min(r.offset for r in parsed.tensors.values())
        self.blob, self.data = blob, blob[self.start :]
        self.tree: dict[str, Any] = {
            "metadata": parsed.metadata,
            "tensors": [
                {
                    "name": r.name,
                    "dims": list(reversed(r.shape)),
                    "kind": IDS[r.ggml_type],
                    "offset": r.offset - self.start,
                }
                for r in parsed.tensors.values()
            ],
        }

    def encode(self, tree: Any) -> bytes:
        metadata, tensors = (tree.get("metadata"), tree.get("tensors")) if isinstance(tree, dict) else ({}, [])
        pairs = list(metadata.items()) if isinstance(metadata, dict) else []
        records = [r for r in tensors if isinstance(r, dict)] if isinstance(tensors, list) else []
        head = b"GGUF" + struct.pack("<IQQ", 3, len(records), len(pairs))
        head += b"".join(text(key) + typed(value) for key, value in pairs) + b"".join(map(record, records))
        return head + bytes(-len(head) % 32) + self.data


def text(value: Any) -> bytes:
    blob = str(value)[:100_000].encode("utf-8", "surrogatepass")  # surrogates become the invalid UTF-8 they are
    return struct.pack("<Q", len(blob)) + blob


def typed(value: Any) -> bytes:
    kind, blob = valued(value)
    return struct.pack("<I", kind) + blob


def valued(value: Any) -> tuple[int, bytes]:
    """A value's GGUF type and bytes; what the format cannot hold becomes text."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if 0 <= value < 2**32 else (11, struct.pack("<q", signed(value)))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, list):
        made = [valued(v) for v in value]
        kinds = {kind for kind, _ in made} or {0}
        if len(kinds) > 1:
            made, kinds = [(8, text(v)) for v in value], {8}
        return 9, struct.pack("<IQ", kinds.pop(), len(made)) + b"".join(blob for _, blob in made)
    return 8, text(value)


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def record(tensor: dict) -> bytes:
    dims = tensor.get("dims") if isinstance(tensor.get("dims"), list) else []
    numbers = [d % 2**64 if isinstance(d, int) else 0 for d in dims]
    kind, offset = (tensor.get(k) if isinstance(tensor.get(k), int) else 0 for k in ("kind", "offset"))
    blob = text(tensor.get("name")) + struct.pack("<I", len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)
    return blob + struct.pack("<IQ", kind % 2**32, offset % 2**64)
