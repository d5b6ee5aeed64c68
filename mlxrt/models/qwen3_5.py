"""Qwen3.5, dense and with experts: Qwen3-Next's parts, alone or as the text part of one that sees."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .moe import ROUTING_NOISE
from .multimodal import TOWERS, text_name, text_part
from .qwen3_next import Hybrid, HybridConfig, SharedMixture, SparseConfig
from .sanitize_moe import rename_experts, stack_experts

# Drafting further tokens, and the dtype of the state, which is float32 here whatever it says. (mrope gives a text one
# position on all its axes, so the sections in rope_parameters do not matter either.)
NOISE = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
EXPERTS = frozenset(
    {
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    }
)


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(HybridConfig):
    noise: ClassVar[frozenset[str]] = HybridConfig.noise | ROUTING_NOISE | NOISE | EXPERTS
    pinned: ClassVar[Mapping[str, tuple]] = {**HybridConfig.pinned, "num_experts": (0, None)}


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(SparseConfig):
    noise: ClassVar[frozenset[str]] = SparseConfig.noise | NOISE
    # Of Qwen3-Next's choices this family has one each.
    pinned: ClassVar[Mapping[str, tuple]] = {
        **SparseConfig.pinned,
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    }


class Qwen35(Hybrid):
    Config: type[HybridConfig] = Qwen35Config
    DROPS = (*Hybrid.DROPS, *TOWERS)
    rename = staticmethod(text_name)

    @classmethod
    def parse(cls, raw):
        return cls.Config.parse(text_part(raw) if "text_config" in raw else raw)


class Qwen35Moe(Qwen35):
    Config = Qwen35MoeConfig

    @staticmethod
    def rename(key):
        return rename_experts(text_name(key))

    def mlp(self, c, i):
        return SharedMixture(c)

    @classmethod
    def arrange(cls, config, arrays):
        return stack_experts(super().arrange(config, arrays), config.num_experts)
