"""Phi-3, Phi-3.5 and Phi-4: Llama whose checkpoints hold q, k and v in one matrix, gate and up in another."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Self

import mlx.core as mx

from ..errors import BadCheckpoint, quote
from .config import SUPPORTED_VALUES, ModelConfig
from .llama import Llama
from .rope import read_rope

FUSED = re.compile(r"(.*\.)(self_attn\.qkv_proj|mlp\.gate_up_proj)\.(\w+)")


@dataclass(frozen=True)
class Phi3Config(ModelConfig):
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"partial_rotary_factor", "rotary_dim", "lm_head_bias"})

    @classmethod
    def parse(cls, raw: Mapping[str, Any], supported: Mapping[str, tuple] | None = None) -> Self:
        known = {key: values for key, values in SUPPORTED_VALUES.items() if key != "partial_rotary_factor"}
        return super().parse(raw, supported or known | {"lm_head_bias": (False, None)})

    def read_rope(self, raw):
        return read_rope(raw, self.head_dim, self.max_position_embeddings, partial=True)

    def windows_without_types(self, raw):
        """The long versions have a window that is longer than their context: it never hides anything."""
        window = self.sliding_window
        return (None if window is None or window >= self.context else window,) * self.num_hidden_layers


class Phi3(Llama):
    Config = Phi3Config

    @staticmethod
    def sanitize(config, arrays):
        """Whole rows are divided, so packed matrices stay packed."""
        wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        split: dict[str, mx.array] = {}
        for name, array in arrays.items():
            found = FUSED.fullmatch(name)
            if not found:
                split[name] = array
                continue
            module, rows = "mlp", {"gate": config.intermediate_size, "up": config.intermediate_size}
            if found[2].startswith("self_attn"):
                module, rows = "self_attn", {"q": wide, "k": narrow, "v": narrow}
            if array.shape[0] != sum(rows.values()):
                raise BadCheckpoint(
                    f"{quote(name)}: expected {sum(rows.values())} rows, found shape {list(array.shape)}"
                )
            ends = list(accumulate(rows.values()))[:-1]
            parts = zip(rows, mx.split(array, ends, axis=0), strict=True)
            split |= {f"{found[1]}{module}.{n}_proj.{found[3]}": part for n, part in parts}
        return split
