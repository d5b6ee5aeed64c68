"""Gemma 2: every other layer slides, attention scores and logits are capped."""

from dataclasses import dataclass
from typing import ClassVar

from ..errors import BadCheckpoint
from .config import needs
from .gemma import Gemma, GemmaAttention, GemmaConfig, GemmaMLP, Sandwich, add_one


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    noise: ClassVar[frozenset[str]] = frozenset({"sliding_window_size"})  # an older name, always beside the new one
    query_pre_attn_scalar: float = needs(high=1e6)
    attn_logit_softcapping: float | None = needs(high=1e6)
    final_logit_softcapping: float | None = needs(high=1e6)

    def windows_without_types(self, raw):
        if self.sliding_window is None:
            raise BadCheckpoint("config.json has no sliding_window; every other layer of a gemma2 needs it")
        return tuple(None if i % 2 else self.sliding_window for i in range(self.num_hidden_layers))


class Gemma2(Gemma):
    Config = Gemma2Config

    def block(self, c, i):
        attention = GemmaAttention(c, i, softcap=c.attn_logit_softcapping)
        return Sandwich(c, attention, GemmaMLP(c.hidden_size, c.intermediate_size))

    @classmethod
    def arrange(cls, config, arrays):
        return add_one(arrays)
