"""config.json of Gemma 4: which layers slide, how wide each is, and whose keys and values it reads.

Both spellings of the widths of full attention are read: `global_head_dim` and `per_layer_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..errors import BadCheckpoint, UnsupportedModel, shown
from .config import checked, needs, report
from .gemma import FULL, GEMMA, SLIDING, GemmaConfig, rope_section

OVERRIDES = ("num_key_value_heads", "head_dim")
EVERY = 6  # without layer_types, every sixth layer is full


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    made: ClassVar[frozenset[str]] = GemmaConfig.made | {"sources"}
    noise: ClassVar[frozenset[str]] = frozenset({"global_head_dim", "num_global_key_value_heads", "per_layer_config"})
    # "vision": images see themselves whole; text stays causal.
    pinned: ClassVar = {
        **GEMMA,
        "use_bidirectional_attention": (None, False, "vision"),
        "expert_intermediate_size": (None,),
    }
    hidden_size_per_layer_input: int | None = needs(low=0)
    vocab_size_per_layer_input: int = 0
    num_kv_shared_layers: int = needs(low=0, default=0)
    use_double_wide_mlp: bool = False
    attention_k_eq_v: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    sources: tuple[int | None, ...] = ()  # whose keys and values a layer reads; None: its own

    @classmethod
    def parse(cls, raw: Mapping[str, Any], pinned: Mapping[str, tuple] | None = None) -> Self:
        types = raw.get("layer_types")
        if isinstance(types, list) and types[-1:] == [SLIDING]:
            report(
                "config.json: the last of layer_types slides; every Gemma 4 ends in full attention, so this one does"
            )
        return super().parse(raw, pinned)

    def _complete(self, raw) -> Self:
        super()._complete(raw)
        object.__setattr__(self, "sources", self.find_sources())
        self.check_inputs()
        if self.enable_moe_block:
            self.check_experts()
        return self

    def _windows(self, raw):
        return (*super()._windows(raw)[:-1], None)

    def windows_without_types(self, raw):
        if self.sliding_window is None:
            raise BadCheckpoint("config.json has no sliding_window; gemma4 needs it")
        return tuple(None if (i + 1) % EVERY == 0 else self.sliding_window for i in range(self.num_hidden_layers))

    def rope_keys(self, raw, kind):
        return rope_section(raw, kind, f"rope_parameters.{kind}.rope_theta")

    def read_sizes(self, raw):
        sizes = [(self.num_key_value_heads, self.head_dim)] * self.num_hidden_layers
        for i, given in self.overrides(raw).items():
            heads, dim = (given.get(key, own) for key, own in zip(OVERRIDES, sizes[i], strict=True))
            if self.num_attention_heads % heads:
                raise BadCheckpoint(
                    f"config.json: {self.num_attention_heads} attention heads are no multiple of "
                    f"the {heads} key-value heads of layer {i}"
                )
            sizes[i] = heads, dim
        return tuple(sizes)

    def overrides(self, raw) -> dict[int, dict[str, int]]:
        """What full attention has instead of num_key_value_heads and head_dim, by layer."""
        if "per_layer_config" in raw:
            return read_layers(raw["per_layer_config"], self.num_hidden_layers)
        if raw.get("global_head_dim") is None:
            raise BadCheckpoint("config.json has neither global_head_dim nor per_layer_config; gemma4 needs one")
        own = {"head_dim": checked("global_head_dim", "int", raw["global_head_dim"])}
        heads = checked("num_global_key_value_heads", "int | None", raw.get("num_global_key_value_heads"))
        if heads is not None and self.attention_k_eq_v:  # the models with values of their own do not use it
            own["num_key_value_heads"] = heads
        return {i: own for i, window in enumerate(self.windows) if window is None}

    def find_sources(self) -> tuple[int | None, ...]:
        """The last layers read the last one of their kind that has keys and values."""
        n = self.num_hidden_layers
        first = n - self.num_kv_shared_layers
        found: list[int | None] = [None] * n
        for i in range(max(first, 0), n):
            alike = [j for j in range(first) if (self.windows[j] is None) == (self.windows[i] is None)]
            if not alike or self.sizes[alike[-1]] != self.sizes[i]:
                kind = FULL if self.windows[i] is None else SLIDING
                raise BadCheckpoint(
                    f"config.json: num_kv_shared_layers = {self.num_kv_shared_layers}, but no layer before {first} "
                    f"has the keys and values of {kind} that layer {i} would read"
                )
            found[i] = alike[-1]
        return tuple(found)

    def check_inputs(self) -> None:
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise BadCheckpoint(
                f"config.json: vocab_size_per_layer_input = {self.vocab_size_per_layer_input} must cover the "
                f"vocab_size of {self.vocab_size}"
            )

    def check_experts(self) -> None:
        keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
        if self.num_experts is None or self.top_k_experts is None or self.moe_intermediate_size is None:
            raise BadCheckpoint(f"config.json: enable_moe_block needs {', '.join(keys)}; one of them is missing")
        if self.top_k_experts > self.num_experts:
            raise BadCheckpoint(f"config.json: top_k_experts {self.top_k_experts} of {self.num_experts} experts")


def read_layers(given: Any, count: int) -> dict[int, dict[str, int]]:
    """`per_layer_config`: {"2": {"head_dim": 512, ...}, ...}."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        raise BadCheckpoint(f"config.json: per_layer_config must be an object of objects, not {shown(given)}")
    layers: dict[int, dict[str, int]] = {}
    for key, own in given.items():
        if not key.isdecimal() or len(key) > 5 or int(key) >= count:
            raise BadCheckpoint(f"config.json: per_layer_config names {shown(key)}, which is none of {count} layers")
        if strange := sorted(set(own) - set(OVERRIDES)):
            raise UnsupportedModel(f"config.json: per_layer_config.{key} sets {shown(strange[0])}; only {OVERRIDES}")
        layers[int(key)] = {name: checked(f"per_layer_config.{key}.{name}", "int", v) for name, v in own.items()}
    return layers
