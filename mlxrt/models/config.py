"""Parses config.json, and ignores nothing silently.

Every key is used, listed as irrelevant to the arithmetic, restricted to the values we support, or reported.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Self

from ..errors import BadCheckpoint, UnsupportedModel, quote
from .rope import RopeParams, find_unknown_keys, merge_settings, read_rope

log = logging.getLogger("mlxrt")
_reports: ContextVar[bool] = ContextVar("reports", default=True)


@contextmanager
def suppress_reports() -> Iterator[None]:
    """Parse without log lines: `info` and `convert` parse a config more than once."""
    token = _reports.set(False)
    try:
        yield
    finally:
        _reports.reset(token)


def report(line: str) -> None:
    """Log a key that has no effect, or not the one it claims."""
    if _reports.get():
        log.warning(line)


# Keys without effect on the forward pass.
IGNORED_KEYS = frozenset(
    """architectures auto_map bos_token_id eos_token_id pad_token_id torch_dtype dtype transformers_version use_cache
    attention_dropout hidden_dropout embd_pdrop resid_pdrop initializer_range name_or_path _name_or_path model_type
    output_attentions output_hidden_states output_router_logits return_dict id2label label2id problem_type
    finetuning_task is_encoder_decoder is_decoder gradient_checkpointing quantization quantization_config
    is_llama_config transformers.js_config unsloth_fixed unsloth_version task_specific_params tokenizer_class
    max_window_layers original_max_position_embeddings cache_implementation sep_token_id decoder_start_token_id
    chunk_size_feed_forward vocab_size_padded tf_legacy_loss attn_implementation _attn_implementation_autoset
    use_return_dict torchscript use_bfloat16 pruned_heads prefix add_cross_attention tie_encoder_decoder
    cross_attention_hidden_size jang_config jang codebook_config mxtq_bits mxtq_seed weight_format jangtq jangt
    jang_norms_pre_shifted jang_mup_folded jang_expert_pruning pretraining_tp""".split()
)  # those of JANG and codebooks describe how weights are stored: mlxrt/weights reads them
SUPPORTED_VALUES: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
}
LARGEST = {"vocab_size": 1 << 24, "num_hidden_layers": 1 << 12, "max_position_embeddings": 1 << 30}
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rope_freq_factors", "max_sequence_length"}


def config_field(low=None, high=None, **options) -> Any:
    return field(metadata={"low": low, "high": high}, **options)


@dataclass(frozen=True)
class ModelConfig:
    """The keys all decoder-only families share, by their names on the Hub."""

    ignored_keys: ClassVar[frozenset[str]] = frozenset()  # the family's own keys without effect
    derived: ClassVar[frozenset[str]] = frozenset({"rope", "windows"})  # fields computed from keys
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeParams
    num_key_value_heads: int = 0  # 0: as many as attention heads
    head_dim: int = 0  # 0: hidden_size / heads
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: tuple[str, ...] | None = None
    model_type: str = ""
    windows: tuple[int | None, ...] = ()  # per layer, from the keys above

    @classmethod
    def parse(cls, raw: Mapping[str, Any], supported: Mapping[str, tuple] = SUPPORTED_VALUES) -> Self:
        values = {f.name: raw[f.name] for f in fields(cls) if f.name in raw and f.name not in cls.derived}
        for f in fields(cls):
            if f.name in values:
                kind = f.type.__name__ if isinstance(f.type, type) else str(f.type)
                values[f.name] = check_value(f.name, kind, values[f.name], **f.metadata)
            elif f.name not in cls.derived and f.default is MISSING:
                raise BadCheckpoint(f"config.json has no {f.name}; {raw.get('model_type')} needs it")
        for key, allowed in supported.items():
            if key in raw and raw[key] not in allowed:
                raise UnsupportedModel(
                    f"config.json: {key} = {quote(raw[key])} is not supported (only {one_of(allowed)})"
                )
        known = {f.name for f in fields(cls)} - cls.derived | ROPE_KEYS | set(supported)
        for key in sorted(set(raw) - known - IGNORED_KEYS - cls.ignored_keys):
            report(f"config.json: {quote(key)} is unknown to mlxrt and has no effect")
        for key in find_unknown_keys(raw):
            report(f"config.json: {quote(key)} is unknown to mlxrt and has no effect")
        return cls(**values, rope=None)._complete(raw)  # type: ignore[arg-type]

    def _complete(self, raw) -> Self:
        """Set the derived fields."""
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  still under construction
        put("num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise BadCheckpoint(
                    f"config.json: hidden_size {self.hidden_size} is no multiple of {self.num_attention_heads} heads"
                )
            put("head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise BadCheckpoint(
                f"config.json: {self.num_attention_heads} attention heads are no multiple of "
                f"{self.num_key_value_heads} key-value heads"
            )
        put("rope", self.read_rope(raw))
        put("windows", self._windows(raw))
        return self

    def read_rope(self, raw) -> RopeParams:
        """The RoPE of full attention; families with several kinds of layers override it."""
        return read_rope(raw, self.head_dim, self.max_position_embeddings)

    @classmethod
    def rope_settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What a config says of RoPE's scaling, in either form."""
        return merge_settings(raw)

    def _windows(self, raw) -> tuple[int | None, ...]:
        n = self.num_hidden_layers
        if self.layer_types is not None:
            if len(self.layer_types) != n:
                raise BadCheckpoint(f"config.json: {len(self.layer_types)} layer_types for {n} layers")
            for kind in self.layer_types:
                if kind not in ("full_attention", "sliding_attention"):
                    raise UnsupportedModel(
                        f"config.json: layer_types holds {quote(kind)}, which this family does not have"
                    )
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                raise BadCheckpoint("config.json: layer_types has sliding_attention but sliding_window is missing")
            return tuple(self.sliding_window if k == "sliding_attention" else None for k in self.layer_types)
        return self.windows_without_types(raw)

    @property
    def context(self) -> int:
        """The context length the model was trained for, or was extended to by the scaling of its RoPE."""
        longest = max(self.max_position_embeddings, min(self.rope.reach or 0, LARGEST["max_position_embeddings"]))
        return min(longest, self.rope.limit or longest)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts: families that have some override it."""
        return False

    def windows_without_types(self, raw) -> tuple[int | None, ...]:
        """What sliding_window means without layer_types: families override it."""
        if self.sliding_window is not None:
            raise UnsupportedModel(
                f"config.json: sliding_window = {self.sliding_window} means nothing to {self.model_type}"
            )
        return (None,) * self.num_hidden_layers


def check_value(name: str, kind: str, value, low=None, high=None):
    """The value, if it is of the annotated type and within its bounds; otherwise an error that names it."""
    if value is None and "None" in kind:
        return None
    if value is None and name in ("num_key_value_heads", "head_dim"):
        return 0
    if "bool" in kind:
        if isinstance(value, bool):
            return value
    elif "tuple" in kind:
        if isinstance(value, list) and all(type(v) is (int if "int" in kind else str) for v in value):
            return tuple(value)
    elif "int" in kind:
        if isinstance(value, int) and not isinstance(value, bool):
            low, high = 1 if low is None else low, LARGEST.get(name, 1 << 22) if high is None else high
            if low <= value <= high:
                return value
    elif "float" in kind:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and (low or 0) < value < (high or 1):
            return float(value)
    elif isinstance(value, str):
        return value
    raise BadCheckpoint(f"config.json: {name} = {quote(value)} is not a usable {kind}")


def one_of(values) -> str:
    return " or ".join(repr(v) for v in values)
