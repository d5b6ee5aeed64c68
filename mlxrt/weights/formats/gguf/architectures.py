"""The GGUF architectures mlxrt supports: tensor names, what llama.cpp's converter changes, and their own keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....errors import UnsupportedModel
from ....models.config import ModelConfig
from . import architecture_configs as configs
from . import architecture_keys as keys_of
from . import names, reorder
from .architecture_configs import LOCAL_ROPE_THETA, Config, Tensors
from .metadata import ArchMetadata
from .names import EXPERTS, LAYER_NAMES
from .reader import GGUFTensor

Order = Callable[[GGUFTensor, Mapping[str, Any]], np.ndarray | None]
DELTA_NET_KEYS = frozenset(
    {f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")}
    | {"full_attention_interval", "attention.recurrent_layers", "rope.dimension_sections"}
)
SHARED_EXPERT_KEYS = frozenset({"expert_weights_norm", "expert_shared_feed_forward_length", "expert_shared_count"})
GEMMA_4_KEYS = frozenset(
    {"final_logit_softcapping", "embedding_length_per_layer_input", "attention.shared_kv_layers"}
    | {"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"}
)


def set_factors(config: Config, factors: list[float]) -> None:
    config["rope_freq_factors"] = factors


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture."""

    model_type: str
    hub_class: str
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    extra_keys: frozenset[str] = frozenset()  # its own keys
    config: Callable[[ArchMetadata, Tensors], Config] = lambda keys, tensors: {}  # from its own keys
    keys: Callable[[Any, Mapping[str, Any]], Config] = lambda config, rope: {}  # and back, for writing
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # matrices of ours that files have in one
    row_order: Order = lambda tensor, config: None  # of rows that the converter moves: where they belong
    column_order: Order = lambda tensor, config: None
    norm_plus_one: bool = False  # the converter adds the 1 that the model adds to its norm weights
    full_every: int | None = None  # full attention in every n-th layer by default; 0: never; None: unknown
    needs_window: bool = False  # a window is required
    yarn_extras: Mapping[str, Any] | None = None  # more YaRN settings; with it, YaRN is the default
    rope_theta: float | None = 10000.0  # where the file has none; None: it must have one
    local_rope_theta: float | None = None  # of sliding-window layers, if not given; None: one for all layers
    partial_rope: bool = False  # RoPE may turn a part of a head
    sizes_vary: bool = False  # key-value heads and MLP widths may differ between layers; `config` reads them
    dense_mlp: bool = True  # feed_forward_length is required
    rope_factors: Callable[[Config, list[float]], None] | None = set_factors  # what rope_freqs means; None: nothing
    needs_rope_factors: bool = False
    long_rope: bool = False  # may have factors for short and long contexts, as tensors

    def rename(self, name: str) -> str:
        """The Hugging Face name; an unknown one stays, and building the model reports it."""
        return names.rename(name, self.names)

    def file_name(self, name: str) -> str | None:
        """The GGUF name of one of our model's tensors; None where there is none."""
        return names.restore(name, self.names)

    def write_keys(self, config: ModelConfig, rope: Mapping[str, Any]) -> Config:
        """The keys of a model, without the prefix; `rope`: what config.json says of it."""
        shared = keys_of.base_keys(config, self.sizes_vary) | keys_of.rope_keys(config, rope)
        per_layer = self.full_every is None and self.sizes_vary
        return shared | keys_of.window_keys(config, self.full_every, per_layer) | self.keys(config, rope)


ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", LAYER_NAMES | EXPERTS, config=configs.llama,
        keys=keys_of.llama, row_order=reorder.order_llama_rows, full_every=0,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", LAYER_NAMES | EXPERTS | names.SHARED_EXPERT, config=configs.qwen2_moe,
        keys=keys_of.qwen2_moe,
        extra_keys=SHARED_EXPERT_KEYS, dense_mlp=False,
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", LAYER_NAMES | EXPERTS, config=configs.sparse_config,
        keys=keys_of.sparse_keys, rope_theta=None,
        extra_keys=frozenset({"expert_weights_norm"}),
    ),
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM",
        LAYER_NAMES | names.FUSED_EXPERTS | names.SHARED_EXPERT | names.DELTA_NET, config=configs.qwen3_5_moe,
        keys=keys_of.qwen3_next, joined=names.JOINED_BETA_ALPHA,
        extra_keys=DELTA_NET_KEYS | SHARED_EXPERT_KEYS, norm_plus_one=True, rope_theta=None, partial_rope=True,
        dense_mlp=False,
    ),
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", LAYER_NAMES | names.DELTA_NET, config=configs.qwen3_5,
        keys=keys_of.qwen3_5,
        row_order=reorder.order_value_rows, column_order=reorder.order_value_columns, extra_keys=DELTA_NET_KEYS,
        norm_plus_one=True, rope_theta=None, partial_rope=True,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
        LAYER_NAMES | names.FUSED_EXPERTS | names.SHARED_EXPERT | names.DELTA_NET, config=configs.qwen3_5_moe,
        keys=keys_of.qwen3_5_moe,
        row_order=reorder.order_value_rows, column_order=reorder.order_value_columns,
        extra_keys=DELTA_NET_KEYS | SHARED_EXPERT_KEYS, norm_plus_one=True, rope_theta=None, partial_rope=True,
        dense_mlp=False,
    ),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", LAYER_NAMES | EXPERTS | names.GPT_OSS, config=configs.gpt_oss,
        keys=keys_of.gpt_oss, full_every=2, needs_window=True,
        extra_keys=frozenset({"swiglu_clamp_exp"}), yarn_extras={"truncate": False}, rope_theta=None,
    ),
    "minimax-m2": Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM", LAYER_NAMES | EXPERTS | names.MINIMAX_M2, config=configs.minimax_m2,
        keys=keys_of.minimax_m2,
        extra_keys=frozenset({"expert_gating_func"}), rope_theta=None, partial_rope=True, dense_mlp=False,
    ),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM", LAYER_NAMES | names.PHI_3, config=configs.phi3,
        keys=keys_of.phi3, joined=names.JOINED_PHI_3, partial_rope=True, full_every=0, long_rope=True,
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", LAYER_NAMES | names.POST_NORMS, config=configs.gemma2,
        keys=keys_of.gemma2, full_every=2, needs_window=True, norm_plus_one=True,
        extra_keys=frozenset({"attention.scale", "attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", LAYER_NAMES | names.POST_NORMS, config=configs.gemma3,
        keys=keys_of.gemma3, full_every=6,
        norm_plus_one=True, extra_keys=frozenset({"attention.scale", "final_logit_softcapping"}), rope_theta=None,
        local_rope_theta=LOCAL_ROPE_THETA, rope_factors=None,
    ),
    "gemma4": Architecture(
        "gemma4_text", "Gemma4ForCausalLM", LAYER_NAMES | names.GEMMA_4, config=configs.gemma4,
        keys=keys_of.gemma4, joined=names.JOINED_GEMMA_4, needs_window=True,
        extra_keys=GEMMA_4_KEYS, rope_theta=None, local_rope_theta=LOCAL_ROPE_THETA, sizes_vary=True,
        rope_factors=configs.gemma4_rope, needs_rope_factors=True,
    ),
}  # fmt: skip


def read_windows(keys: ArchMetadata, arch: Architecture, layers: int) -> Config:
    """Which layers have a sliding window, from the file or the architecture."""
    size, key = keys.integer("attention.sliding_window", 0, low=0), "attention.sliding_window_pattern"
    if not size and (arch.needs_window or keys.find(key) not in (None, 1)):
        raise keys.wrong("attention.sliding_window", "an integer >= 1")
    if not size:
        return {"layer_types": ["full_attention"] * layers} if arch.full_every else {}
    if isinstance(keys.find(key), list):
        slides = keys.booleans(key, layers)
    elif keys.find(key) is not None or arch.full_every is not None:
        every = keys.integer(key, arch.full_every, low=0)
        slides = [every == 0 or (i + 1) % every != 0 for i in range(layers)]
    else:
        raise UnsupportedModel(
            f"{keys.architecture}.attention.sliding_window = {size}: the GGUF does not say for which layers "
            f"(no key {keys.architecture}.{key})"
        )
    return {"sliding_window": size, "layer_types": ["sliding_attention" if s else "full_attention" for s in slides]}
