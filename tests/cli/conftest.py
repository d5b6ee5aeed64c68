"""A tiny model folder with a tokenizer and a chat template, and a way to run the command line on it in this process."""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.cli import main

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if tools %}tools {{ tools | length }}\n{% endif %}"
    "{% if enable_thinking is defined %}thinking {{ enable_thinking }}\n{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": 258,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 257,
}
MATRICES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}


def weights() -> dict[str, mx.array]:
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (258, 32), "lm_head": (258, 32), "model.norm": (32,)}
    for i in range(2):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in MATRICES.items()}
        shapes |= {f"model.layers.{i}.{n}": (32,) for n in ("input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": mx.array(random.standard_normal(s, np.float32) * 0.5) for name, s in shapes.items()}


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """One token per byte, and the two that frame a message."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@dataclass(frozen=True)
class Folder:
    """A model folder that a test may damage."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def configure(self, **changes) -> None:
        (self.path / "config.json").write_text(json.dumps(CONFIG | changes))

    def recommend(self, **values) -> None:
        (self.path / "generation_config.json").write_text(json.dumps(values))

    def store(self, arrays: dict[str, mx.array]) -> None:
        mx.save_safetensors(str(self.path / "model.safetensors"), arrays, {"format": "mlx"})


@pytest.fixture
def folder(tmp_path) -> Folder:
    made = Folder(tmp_path / "tiny")
    made.path.mkdir()
    made.configure()
    made.store(weights())
    write_tokenizer(made.path)
    return made


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def refused(self, code: int) -> str:
        """The one line that says what is wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("mlxrt: ")]
        assert self.code == code, self
        assert len(lines) == 1 and self.err.endswith(lines[0] + "\n"), self.err
        assert "Traceback" not in self.err and self.out == ""
        return lines[0]


@pytest.fixture
def cli(capfd, monkeypatch):
    def run(*argv: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capfd.readouterr()
        code = main([str(a) for a in argv])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run
