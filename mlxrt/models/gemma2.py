"""Gemma 2: every other layer slides, attention scores and logits are capped."""

from dataclasses import dataclass
from typing import ClassVar

from ..errors import BadCheckpoint
from .config import config_field
from .gemma import Gemma, GemmaAttention, GemmaBlock, GemmaConfig, GemmaMLP, add_one_to_norms


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    # An older name, always beside the new one.
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"sliding_window_size"})
    query_pre_attn_scalar: float = config_field(high=1e6)
    attn_logit_softcapping: float | None = config_field(high=1e6)
    final_logit_softcapping: float | None = config_field(high=1e6)

    def windows_without_types(self, raw):
        if self.sliding_window is None:
            raise BadCheckpoint("config.json has no sliding_window; every other layer of a gemma2 needs it")
        return tuple(None if i % 2 else self.sliding_window for i in range(self.num_hidden_layers))


class Gemma2(Gemma):
    Config = Gemma2Config
    sanitize = staticmethod(add_one_to_norms)

    def block(self, c, i):
        attention = GemmaAttention(c, i, softcap=c.attn_logit_softcapping)
        return GemmaBlock(c, attention, GemmaMLP(c.hidden_size, c.intermediate_size))
