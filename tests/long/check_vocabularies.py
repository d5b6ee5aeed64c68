"""`mlxrt convert` from every vocabulary of GGUF files to every format: python -m tests.long.check_vocabularies.

    python -m tests.long.check_vocabularies [--vocabularies llama-spm gpt-2] [--formats mlx mlx:16 jang jangtq codebook]

The vocabularies are published ones, with the samples that tests/text/token_vectors.py fetches; the model in front of
each is a small random one in Q8_0. The folder must encode every text as the file does, have its chat template, and
answer; where the conversion keeps the bits, with the same tokens.
"""

import argparse
import sys
import tempfile
from pathlib import Path

# isort: off
import mlxrt  # before MLX: it brings the BLAS
# isort: on

import gguf
import numpy as np

from mlxrt.cli import main
from tests.support.tiny_files import write_gguf
from tests.text.token_vectors import BETWEEN, REFUSED, fetch, metadata, vocabularies

CONFIG = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ bos_token }}[assistant]"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où est 東京? <s> it's\n\n  here"}]
LOSSLESS = ("mlx",)  # every matrix of the file is Q8_0, which MLX's affine format holds exactly; float16 rounds it


def make_weights(vocab: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    width, inner, heads, kv_heads = (CONFIG["hidden_size"], CONFIG["intermediate_size"], 128, 64)
    draw = lambda rows, columns: (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)  # noqa: E731
    ones = np.ones(width, np.float32)
    weights = {"model.embed_tokens.weight": draw(vocab, width), "model.norm.weight": ones}
    for i in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes = {"q": (heads, width), "k": (kv_heads, width), "v": (kv_heads, width), "o": (width, heads)}
        weights |= {f"{at}self_attn.{n}_proj.weight": draw(*shape) for n, shape in shapes.items()}
        weights |= {f"{at}mlp.{n}_proj.weight": draw(inner, width) for n in ("gate", "up")}
        weights[f"{at}mlp.down_proj.weight"] = draw(width, inner)
        weights |= {f"{at}{n}_layernorm.weight": ones for n in ("input", "post_attention")}
    return weights


def write_model(path: Path, values: dict) -> Path:
    def add_vocabulary(writer) -> None:
        for key, value in values.items():
            if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
                kind = gguf.GGUFValueType.get_type(value)
                writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if key.endswith("_token_id") else kind)
        writer.add_chat_template(TEMPLATE)

    weights = make_weights(len(values["tokenizer.ggml.tokens"]), seed=len(path.name))
    return write_gguf(path, weights, CONFIG, "Q8_0", add_vocabulary)


def describe(model: Path, samples: list[str]) -> tuple[list, list]:
    """What a tokenizer makes of the samples and of messages, and greedy answers."""
    with mlxrt.load(str(model)) as engine:
        tokenizer = engine.tokenizer
        encoded = [tokenizer.encode(text, special=special) for text in samples for special in (True, False)]
        told = [tokenizer.decode(ids) for ids in encoded]
        chat = engine.encode(mlxrt.Request(messages=MESSAGES))
        answers = engine.generate([MESSAGES, "Once upon a time"], max_tokens=16, ignore_eos=True)
        return [encoded, told, chat, tokenizer.render(MESSAGES)], [answer.tokens for answer in answers]


def check(name: str, files: dict[str, bytes], formats: list[str], folder: Path) -> bool:
    values = metadata(files["gguf"])
    path, samples = (
        write_model(folder / f"{name}.gguf", values),
        files["inp"].decode().removesuffix(BETWEEN).split(BETWEEN),
    )
    expected, answers = describe(path, samples)
    fine = True
    for form in formats:
        format, _, bits = form.partition(":")
        out = folder / f"{name}-{format}{bits}"
        flags = ["--format", format, "--no-check", "-q", *(("--bits", bits) if bits else ())]
        if main(["convert", str(path), str(out), *flags]) != 0:
            fine = False
            continue
        found, tokens = describe(out, samples)
        good = found == expected and (form not in LOSSLESS or tokens == answers)
        kind = values["tokenizer.ggml.model"]
        print(f"{name} ({kind}) as {form}: {'right' if good else 'WRONG'}, {len(samples)} samples", flush=True)
        fine &= good
    return fine


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", nargs="*", default=[])
    parser.add_argument("--formats", nargs="*", default=["mlx", "mlx:16", "jang", "jangtq", "codebook"])
    args = parser.parse_args()
    failed = []
    for name, files in vocabularies(fetch()).items():
        if name in REFUSED or (args.vocabularies and name not in args.vocabularies):
            continue
        with tempfile.TemporaryDirectory() as folder:
            if not check(name, files, args.formats, Path(folder)):
                failed.append(name)
    print(f"not as they should be: {', '.join(failed)}" if failed else "all as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run())
