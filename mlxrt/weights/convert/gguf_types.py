"""Which GGUF type each tensor of a file gets: llama.cpp's mixes, so that Q4_K_M is what is known by that name."""

import re
from dataclasses import dataclass

from ...errors import BadRequest
from ..formats.gguf.names import layer_of
from ..formats.gguf.writer import BLOCK_SIZES

# --type -> (the number of general.file_type, the type of most matrices)
FILE_TYPES = {
    "f32": (0, "F32"), "f16": (1, "F16"), "bf16": (32, "BF16"), "q8_0": (7, "Q8_0"), "q4_0": (2, "Q4_0"),
    "q4_1": (3, "Q4_1"), "q5_0": (8, "Q5_0"), "q5_1": (9, "Q5_1"), "q2_k": (10, "Q2_K"), "q3_k_s": (11, "Q3_K"),
    "q3_k_m": (12, "Q3_K"), "q3_k_l": (13, "Q3_K"), "q4_k_s": (14, "Q4_K"), "q4_k_m": (15, "Q4_K"),
    "q5_k_s": (16, "Q5_K"), "q5_k_m": (17, "Q5_K"), "q6_k": (18, "Q6_K"), "iq4_nl": (25, "IQ4_NL"),
}  # fmt: skip
FLOAT_TYPES = ("F32", "F16", "BF16")
# What takes the place of a type whose blocks do not divide the rows.
FALLBACKS = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Norms, routers, convolutions and RoPE's factors: small, and every error in them counts.
KEPT_F32 = re.compile(r"norm|ffn_gate_inp|ssm_conv1d|^rope_|per_layer_model_proj")
MANY_EXPERTS = 8  # Mixtral's: its attention is a small part of the model
LARGE_LAYERS = 80  # of the 70B, whose eight query heads share a value head


@dataclass(frozen=True)
class TypeMix:
    """A --type for one model."""

    name: str
    layers: int
    heads_per_value: int = 1
    experts: int = 0
    tied: bool = False  # the embedding is the head too

    def __post_init__(self) -> None:
        if self.name not in FILE_TYPES:
            raise BadRequest(f"--type must be one of {', '.join(FILE_TYPES)}, not {self.name}")

    @property
    def file_type(self) -> int:
        return FILE_TYPES[self.name][0]

    @property
    def main(self) -> str:
        return FILE_TYPES[self.name][1]

    def choose(self, name: str, shape: tuple[int, ...]) -> str:
        """The type of a tensor by its GGUF name."""
        if not is_quantizable(name, shape):
            return "F32"
        return self.main if self.main in FLOAT_TYPES else fit(self.mixed(name), shape[-1])

    def mixed(self, name: str) -> str:
        stem = name.split(".")[-2]
        if stem == ("token_embd" if self.tied else "output"):
            return "Q8_0" if self.main == "Q8_0" else "Q6_K"
        if self.main in ("Q8_0", "Q6_K", "IQ4_NL") or not self.main.endswith("_K"):
            return self.main
        layer = layer_of(name) or 0
        rules = {"attn_v": self.value_type, "ffn_down": self.down_type, "ffn_down_exps": self.down_type}
        if stem in rules:
            return rules[stem](layer)
        if stem == "attn_k" and self.experts == MANY_EXPERTS:
            return "Q8_0"
        if stem == "attn_output":
            return self.output_type()
        if stem == "attn_qkv":
            return {"q3_k_m": "Q4_K", "q3_k_l": "Q4_K", "q4_k_m": "Q5_K", "q5_k_m": "Q6_K"}.get(self.name, self.main)
        return self.main

    def value_type(self, layer: int) -> str:
        """Of attn_v: errors in values reach the output undamped."""
        if self.experts == MANY_EXPERTS:
            return "Q8_0"
        shared = self.heads_per_value >= 4
        by_name = {
            "q2_k": "Q4_K" if shared else "Q3_K",
            "q3_k_m": "Q5_K" if layer < 2 else "Q4_K",
            "q3_k_l": "Q5_K",
            "q4_k_s": "Q5_K" if layer < 4 else "Q4_K",
            "q4_k_m": "Q6_K" if self.needs_more_bits(layer) else "Q4_K",
            "q5_k_m": "Q6_K" if self.needs_more_bits(layer) else "Q5_K",
        }
        chosen = by_name.get(self.name, self.main)
        large = self.layers == LARGE_LAYERS and self.heads_per_value == 8
        return "Q5_K" if large and chosen in ("Q3_K", "Q4_K") else chosen

    def down_type(self, layer: int) -> str:
        by_name = {
            "q2_k": "Q3_K",
            "q3_k_m": "Q5_K" if layer < self.layers // 16 else "Q4_K",
            "q3_k_l": "Q5_K",
            "q4_k_s": "Q5_K" if layer < self.layers // 8 else "Q4_K",
            "q4_k_m": "Q6_K" if self.needs_more_bits(layer) else "Q4_K",
            "q5_k_m": "Q6_K" if self.needs_more_bits(layer) else "Q5_K",
        }
        return by_name.get(self.name, self.main)

    def output_type(self) -> str:
        """Of attn_output."""
        if self.experts == MANY_EXPERTS:
            return "Q5_K" if self.main in ("Q2_K", "Q3_K", "Q4_K") and self.name != "q3_k_l" else self.main
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(self.name, self.main)

    def needs_more_bits(self, layer: int) -> bool:
        """The first and the last eighth of the layers, and every third between."""
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and name.endswith(".weight") and not KEPT_F32.search(name)


def fit(chosen: str, width: int) -> str:
    """The type, or another whose blocks divide rows of `width`."""
    if width % BLOCK_SIZES[chosen][0]:
        chosen = FALLBACKS.get(chosen, "F16")
    return chosen if width % BLOCK_SIZES[chosen][0] == 0 else "F16"
