"""What configs with experts share: how many there are and how many a token uses, in either spelling."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..errors import BadCheckpoint, shown
from .config import PINNED, ModelConfig

ROUTING_NOISE = frozenset({"router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha"})  # of training only


@dataclass(frozen=True)
class MoEConfig(ModelConfig):
    noise: ClassVar[frozenset[str]] = ROUTING_NOISE
    # other spelling -> the field's name
    spellings: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
    }

    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], pinned: Mapping[str, tuple] = PINNED) -> Self:
        return super().parse(respelled(raw, cls.spellings), pinned)

    def _complete(self, raw) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise BadCheckpoint(
                f"config.json: num_experts_per_tok = {self.num_experts_per_tok} of only {self.num_experts} experts"
            )
        return super()._complete(raw)


def respelled(raw: Mapping[str, Any], spellings: Mapping[str, str]) -> dict[str, Any]:
    """A config in which every key has the name we use."""
    same = dict(raw)
    for other, name in spellings.items():
        if other not in same:
            continue
        value = same.pop(other)
        if name in same and same[name] != value:
            raise BadCheckpoint(
                f"config.json: {other} = {shown(value)} contradicts {name} = {shown(same[name])}; remove one"
            )
        same[name] = value
    return same
