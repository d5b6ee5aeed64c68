"""Qwen3.5, dense and with experts: Qwen3-Next's parts, alone or as the text part of a multimodal checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .moe import ROUTING_KEYS, SharedExpertMoE
from .multimodal import TOWERS, read_text_config, rename_text_tensor
from .qwen3_next import Hybrid, HybridConfig, Qwen3Next, SparseConfig
from .sanitize_moe import rename_experts

# Drafting further tokens, and the dtype of the state, which is float32 here whatever it says. (mrope gives a text one
# position on all its axes, so the sections in rope_parameters do not matter either.)
IGNORED_KEYS = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
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
    ignored_keys: ClassVar[frozenset[str]] = HybridConfig.ignored_keys | ROUTING_KEYS | IGNORED_KEYS | EXPERTS
    supported: ClassVar[Mapping[str, tuple]] = {**HybridConfig.supported, "num_experts": (0, None)}


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(SparseConfig):
    ignored_keys: ClassVar[frozenset[str]] = SparseConfig.ignored_keys | IGNORED_KEYS
    # Of Qwen3-Next's choices this family has one each.
    supported: ClassVar[Mapping[str, tuple]] = {
        **SparseConfig.supported,
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    }


class Qwen35(Hybrid):
    Config: type[HybridConfig] = Qwen35Config
    IGNORED_TENSORS = (*Hybrid.IGNORED_TENSORS, *TOWERS)
    rename = staticmethod(rename_text_tensor)

    @classmethod
    def parse(cls, raw):
        return cls.Config.parse(read_text_config(raw) if "text_config" in raw else raw)


class Qwen35Moe(Qwen35):
    Config = Qwen35MoeConfig
    sanitize = staticmethod(Qwen3Next.sanitize)

    @staticmethod
    def rename(key):
        return rename_experts(rename_text_tensor(key))

    def mlp(self, c, i):
        return SharedExpertMoE(c)
