"""Small models for tests: one of each kind of memory, mixed in every way a family mixes them."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn

from mlxrt.cache.memory import PagedKV, PlainKV, QuantizedKV, Recurrent, RotatingKV, Shared, WindowKV
from mlxrt.kernels import compute_qkv
from mlxrt.models.config import ModelConfig
from mlxrt.models.layers import Attention, Block, GatedMLP
from mlxrt.models.llama import Llama
from mlxrt.models.rope import RopeParams

VOCAB = 97
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
    rope=RopeParams(32, 10_000.0),
    windows=(None,) * 4,
)


class Reader(Attention):
    """A layer without keys and values of its own (Gemma 4)."""

    def __call__(self, x, kv, *, norm, residual):
        q, _, _ = self.qkv_layout().split(compute_qkv(self.qkv(x, norm), self.kernels))
        return residual + self.o_proj(kv.attend(self.rope(q, kv.positions), scale=self.scale).flatten(1))


class Decay(nn.Module):
    """The simplest recurrent layer: a decaying sum with a gate that depends on the token."""

    def __init__(self, c):
        super().__init__()
        self.proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.gate = nn.Linear(c.hidden_size, c.hidden_size, bias=False)

    def __call__(self, x, memory, *, norm, residual):
        h = norm(x)
        return residual + memory.scan(decay, self.proj(h), mx.sigmoid(self.gate(h)))


def decay(parts, x, g):
    state, ys = parts[0], []
    for t in range(x.shape[1]):
        state = g[:, t] * state + x[:, t]
        ys.append(state)
    return (state,), mx.stack(ys, axis=1)


class Toy(Llama):
    """Layers by letter: f full, w window, o rotating, r recurrent, s reads the first full layer."""

    kinds, window, size, codec, keep = "f", 8, 4, None, 0

    def kind(self, i):
        return self.kinds[i % len(self.kinds)]

    def block(self, c, i):
        made = {"s": lambda: Reader(c), "r": lambda: Decay(c)}
        mixer = made.get(self.kind(i), lambda: Attention(c, qk_norm=True))()
        return Block(c, mixer, GatedMLP(c.hidden_size, c.intermediate_size))

    def cache_specs(self):
        c, codec = self.config, self.codec or PlainKV(self.dtype)
        full = PagedKV(c.num_key_value_heads, c.head_dim, codec, self.size)
        made = {
            "f": full,
            "w": WindowKV(c.num_key_value_heads, c.head_dim, codec, self.size, self.window),
            "o": RotatingKV(c.num_key_value_heads, c.head_dim, codec, self.size, self.window, self.keep),
            "r": Recurrent((((c.hidden_size,), self.dtype),), stride=8),
        }
        kinds = [self.kind(i) for i in range(c.num_hidden_layers)]
        return [Shared(kinds.index("f")) if k == "s" else made[k] for k in kinds]


def make(kinds: str, **attributes) -> Toy:
    """One layer of each letter, two at least."""
    mx.random.seed(0)
    layers = max(2, len(kinds))
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers, windows=(None,) * layers)
    model = type("Toy", (Toy,), {"kinds": kinds, **attributes})(config)
    model.fuse()
    mx.eval(model.parameters())
    return model


KINDS = {
    "full": lambda: make("f"),
    "window": lambda: make("w"),
    "narrow": lambda: make("w", window=3),
    "gemma": lambda: make("wf"),
    "shared": lambda: make("wfs"),
    "wide-blocks": lambda: make("wf", size=32),
    "rotating": lambda: make("o", keep=3),
    "rotating-keep": lambda: make("of", keep=5),
    "hybrid": lambda: make("rf"),
    "recurrent": lambda: make("r"),
    "everything": lambda: make("rfws"),
    "q8": lambda: make("wf", codec=QuantizedKV(8, 8)),
    "k8v4": lambda: make("wfs", codec=QuantizedKV(8, 4)),
    "q4-rotating": lambda: make("of", keep=2, codec=QuantizedKV(4, 4)),
    "q3": lambda: make("f", codec=QuantizedKV(6, 3)),
}
