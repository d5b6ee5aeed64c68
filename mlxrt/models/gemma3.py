"""Gemma 3, alone (gemma3_text) or as the text part of a multimodal checkpoint (gemma3).

Norms on q and k, ropes by layer kind.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..errors import BadCheckpoint, quote
from .base import CausalLM
from .config import config_field
from .gemma import (
    FULL,
    GEMMA_VALUES,
    Gemma,
    GemmaAttention,
    GemmaBlock,
    GemmaConfig,
    GemmaMLP,
    add_one_to_norms,
    rope_section,
)
from .multimodal import TOWERS, read_text_config, rename_text_tensor

# The published 4B, 12B and 27B list only what differs from these.
DEFAULTS = {
    "vocab_size": 262208,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
}
# A file that leaves out all of these is one of them; one that leaves out a few is damaged.
FULL_CONFIG_KEYS = {"vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_parameters"}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"}
    )
    supported: ClassVar = {**GEMMA_VALUES, "attn_logit_softcapping": (None,)}
    query_pre_attn_scalar: float = config_field(high=1e6)

    def rope_keys(self, raw, kind):
        return rope_section(raw, kind, "rope_theta" if kind == FULL else "rope_local_base_freq")

    def windows_without_types(self, raw):
        every = raw.get("sliding_window_pattern")
        if self.sliding_window is None or type(every) is not int or every < 1:
            raise BadCheckpoint(
                "config.json must say which layers slide: layer_types, or sliding_window and sliding_window_pattern; "
                f"found {quote(self.sliding_window)} and {quote(every)}"
            )
        n = self.num_hidden_layers
        return tuple(None if (i + 1) % every == 0 else self.sliding_window for i in range(n))


class Gemma3(Gemma):
    Config = Gemma3Config
    IGNORED_TENSORS = (*CausalLM.IGNORED_TENSORS, *TOWERS)
    rename, sanitize = staticmethod(rename_text_tensor), staticmethod(add_one_to_norms)

    @classmethod
    def parse(cls, raw):
        if raw.get("model_type") != "gemma3":
            return cls.Config.parse(raw)
        text = read_text_config(raw)
        if not FULL_CONFIG_KEYS & set(text):
            text = DEFAULTS | text
        return cls.Config.parse(text, {**cls.Config.supported, "final_logit_softcapping": (None,)})

    def block(self, c, i):
        return GemmaBlock(c, GemmaAttention(c, i, qk_norm=True), GemmaMLP(c.hidden_size, c.intermediate_size))
