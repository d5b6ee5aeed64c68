"""Small models for tests: one of each kind of memory, mixed in every way a family mixes them."""

import mlx.core as mx

from mlxrt.cache.memory import FullKV, Plain, Shared, WindowKV
from mlxrt.models.config import ModelConfig
from mlxrt.models.layers import Attention, Block, GatedMLP
from mlxrt.models.llama import Llama
from mlxrt.models.rope import Rope

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
    rope=Rope(32, 10_000.0),
    windows=(None,) * 4,
)


class Reader(Attention):
    """A layer without keys and values of its own (Gemma 4)."""

    def __call__(self, x, kv):
        q, _, _ = self.qkv(x)
        return self.o_proj(kv.attend(self.rope(q, kv.positions), scale=self.scale).flatten(1))


class Toy(Llama):
    """Layers by letter: f full, w window, s reads the first full layer."""

    kinds, window, size = "f", 8, 4

    def kind(self, i):
        return self.kinds[i % len(self.kinds)]

    def block(self, c, i):
        mixer = Reader(c) if self.kind(i) == "s" else Attention(c, qk_norm=True)
        return Block(c, mixer, GatedMLP(c.hidden_size, c.intermediate_size))

    def memory(self):
        c, codec = self.config, Plain(self.dtype)
        made = {
            "f": FullKV(c.num_key_value_heads, c.head_dim, codec, self.size),
            "w": WindowKV(c.num_key_value_heads, c.head_dim, codec, self.size, self.window),
        }
        kinds = [self.kind(i) for i in range(c.num_hidden_layers)]
        return [Shared(kinds.index("f")) if k == "s" else made[k] for k in kinds]


def make(kinds: str, **attributes) -> Toy:
    mx.random.seed(0)
    model = type("Toy", (Toy,), {"kinds": kinds, **attributes})(CONFIG)
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
}
