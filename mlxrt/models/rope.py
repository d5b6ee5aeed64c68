"""Rotary position embedding (RoPE) with every published scaling.

Reads both forms of the config: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`. A missing theta
is an error (the wrong one gives fluent nonsense), but for Llama: its first configs are older than the key.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import BadCheckpoint, UnsupportedModel, quote
from ..kernels import apply_rope

DEFAULT_THETA = {"llama": 10_000.0}  # Llama 1 and 2, Vicuna, OpenLLaMA, early TinyLlama have no rope_theta
NO_ROTATION = 1e30  # a period that never rotates; infinity breaks a GPU's fast math


@dataclass(frozen=True)
class RopeParams:
    """Periods of the rotated pairs, and their scaling."""

    dim: int
    theta: float
    kind: str = "default"
    periods: tuple[float, ...] | None = None  # radians per position is 1 / period; None: theta ** (2i / dim)
    scale: float = 1.0  # on positions
    magnitude: float = 1.0  # on the rotated values
    limit: int | None = None  # the scaling is exact up to this position only
    reach: int | None = None  # the context length that the scaling was made for, where the config says so


class RoPE(nn.Module):
    def __init__(self, rope: RopeParams):
        super().__init__()
        self._rope = rope
        self._periods = None if rope.periods is None else mx.array(rope.periods, mx.float32)

    def __call__(self, x, positions):
        """x [N, H, D], each token at its own position."""
        r, periods = self._rope, self._periods
        return apply_rope(x, positions, r.dim, theta=r.theta, periods=periods, scale=r.scale, magnitude=r.magnitude)

    def constants(self) -> dict[str, Any]:
        """What a kernel needs to apply it: fields of a QKVLayout."""
        r = self._rope
        periods = mx.array(default_periods(r.theta, r.dim), mx.float32) if self._periods is None else self._periods
        inv_freq = r.scale / periods
        mx.eval(inv_freq)  # here: steps may run on another thread, which cannot evaluate what this one left lazy
        return {"inv_freq": inv_freq, "magnitude": r.magnitude}


def merge_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling` and `rope_parameters` in one, where they do not contradict each other."""
    parameters = raw.get("rope_parameters")
    scaling = raw.get("rope_scaling")
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise BadCheckpoint(f"config.json: {name} must be an object, not {quote(value)}")
    if parameters is not None and scaling is not None and {**scaling} != {k: parameters.get(k) for k in scaling}:
        raise BadCheckpoint("config.json: rope_scaling and rope_parameters contradict each other; remove one")
    return dict(scaling or {}) | dict(parameters or {})


def read_rope(raw: Mapping[str, Any], dim: int, context: int, *, partial: bool = False) -> RopeParams:
    """The RoPE of a config, the same for all layers; `partial` allows it on the first part of a head only."""
    given = merge_settings(raw)
    first = DEFAULT_THETA.get(str(raw.get("model_type")))
    theta = read_number(given, "rope_theta", raw.get("rope_theta", first), low=1.001)  # 1 would rotate all pairs alike
    if theta is None:
        raise BadCheckpoint("config.json has no rope_theta (nor rope_parameters.rope_theta); it cannot be guessed")
    if partial:
        dim = rotary_dim(raw, given, dim)
    if dim % 2:
        raise UnsupportedModel(f"config.json: rope over {dim} numbers, an odd count, but it turns pairs")
    whole = not partial and given.get("rope_type", given.get("type")) != "proportional"
    if whole and (factor := read_number(given, "partial_rotary_factor", None, low=0)) not in (None, 1):
        raise UnsupportedModel(f"config.json: partial_rotary_factor = {factor} is not supported by this family")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in ("longrope", "su") and "factor" not in given:  # the context it was extended to says it
        given["factor"] = context / original_context(raw, given, context)
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedModel(
            f"config.json: rope scaling {quote(kind)} is not supported; supported: {', '.join(KINDS)}"
        )
    rope = KINDS[kind](dim, theta, given, original_context(raw, given, context))
    if raw.get("rope_freq_factors") is not None:
        if rope.periods is not None:
            raise UnsupportedModel(f"rope frequency factors together with rope scaling {kind} are not supported")
        return replace(rope, kind="factors", periods=scale_periods(theta, dim, raw["rope_freq_factors"]))
    if kind == "linear" and (length := read_number(raw, "max_sequence_length", None, low=1)) is not None:
        return replace(rope, reach=min(int(length), int(context / rope.scale)))  # Vicuna's long versions
    return rope


def find_unknown_keys(raw: Mapping[str, Any]) -> list[str]:
    """The keys of a config's RoPE that have no effect, each with the object that holds it."""
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        whole = raw.get(name)
        for given in (whole, *whole.values()) if isinstance(whole, Mapping) else ():
            if isinstance(given, Mapping):
                kind = given.get("rope_type", given.get("type", "default"))
                known = COMMON_KEYS | KEYS.get(kind if isinstance(kind, str) else "", set())
                found += [
                    f"{name}.{key}" for key, v in given.items() if key not in known and not isinstance(v, Mapping)
                ]
    return found


def rotary_dim(raw, given, head_dim: int) -> int:
    """How many elements of a head are rotated, from any of the three keys."""
    factors = [read_number(place, "partial_rotary_factor", None, low=0) for place in (given, raw)]
    dims = {int(head_dim * factor) for factor in factors if factor is not None}
    if (direct := read_number(raw, "rotary_dim", None, low=0)) is not None:
        dims.add(int(direct))
    if len(dims) > 1:
        raise BadCheckpoint(f"config.json: rotary_dim and partial_rotary_factor contradict each other: {sorted(dims)}")
    dim = dims.pop() if dims else head_dim
    if not 2 <= dim <= head_dim:
        raise BadCheckpoint(f"config.json: rope over {dim} of a head's {head_dim} numbers is not possible")
    return dim


def original_context(raw, given, context: int) -> int:
    """The context length before scaling."""
    top = raw.get("original_max_position_embeddings")
    n = read_number(given, "original_max_position_embeddings", top, low=1)
    return context if n is None else int(n)


def read_number(given, key: str, default, *, low: float | None = None, required: str | None = None):
    value = given.get(key, default)
    if value is None:
        if required:
            raise BadCheckpoint(f"config.json: rope scaling {required!r} needs {key}")
        return None
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
    if not fine or not math.isfinite(value) or (low is not None and value < low):
        raise BadCheckpoint(f"config.json: {key} = {quote(value)} is not a usable number")
    return float(value)


def default_periods(theta: float, dim: int) -> list[float]:
    return [theta ** (2 * i / dim) for i in range(dim // 2)]


def scale_periods(theta: float, dim: int, factors) -> tuple[float, ...]:
    if not isinstance(factors, (list, tuple)) or len(factors) != dim // 2:
        raise BadCheckpoint(f"rope frequency factors: {dim // 2} numbers expected for head_dim {dim}")
    return tuple(p * f for p, f in zip(default_periods(theta, dim), factors))


def scale_default(dim, theta, given, context) -> RopeParams:
    return RopeParams(dim, theta)


def scale_linear(dim, theta, given, context) -> RopeParams:
    return RopeParams(dim, theta, "linear", scale=1 / read_number(given, "factor", None, low=1e-6, required="linear"))


def scale_llama3(dim, theta, given, context) -> RopeParams:
    """Long periods are scaled by the factor, short ones kept, those between interpolated."""
    factor, low, high = (
        read_number(given, k, None, low=1e-6, required="llama3")
        for k in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if high <= low:
        raise BadCheckpoint(f"config.json: rope high_freq_factor {high} must be above low_freq_factor {low}")
    if "original_max_position_embeddings" not in given:
        raise BadCheckpoint("config.json: rope scaling 'llama3' needs original_max_position_embeddings")
    periods = []
    for p in default_periods(theta, dim):
        rotations = context / (2 * math.pi * p)  # over the original context
        keep = min(1.0, max(0.0, (rotations - low) / (high - low)))
        periods.append(1 / ((1 - keep) / (factor * p) + keep / p))
    return RopeParams(dim, theta, "llama3", tuple(periods))


def scale_proportional(dim, theta, given, context) -> RopeParams:
    """Only the first pairs rotate, with the periods of a fully rotated head (Gemma 4)."""
    share = read_number(given, "partial_rotary_factor", None, low=0)
    share = 1.0 if share is None else share
    factor = read_number(given, "factor", 1.0, low=1e-6)
    if share > 1:
        raise BadCheckpoint(f"config.json: partial_rotary_factor = {share} turns more than there is")
    rotated = int(share * dim // 2)
    periods = [factor * p if i < rotated else NO_ROTATION for i, p in enumerate(default_periods(theta, dim))]
    return RopeParams(dim, theta, "proportional", tuple(periods))


def scale_yarn(dim, theta, given, context) -> RopeParams:
    factor = read_number(given, "factor", None, low=1e-6, required="yarn")
    fast = read_number(given, "beta_fast", None, low=1e-6) or 32.0
    slow = read_number(given, "beta_slow", None, low=1e-6) or 1.0

    def pair(rotations):  # the (fractional) pair with so many rotations over the original context
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(fast), pair(slow)
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last + 0.001 if first == last else last
    periods = []
    for i, p in enumerate(default_periods(theta, dim)):
        stretch = min(1.0, max(0.0, (i - first) / (last - first)))
        periods.append(1 / (stretch / (factor * p) + (1 - stretch) / p))
    # Model cards switch YaRN on by rope_scaling alone: max_position_embeddings keeps the length before it.
    reach = int(context * factor) if given.get("original_max_position_embeddings") is not None else None
    return RopeParams(dim, theta, "yarn", tuple(periods), magnitude=yarn_magnitude(given, factor), reach=reach)


def yarn_magnitude(given, factor: float) -> float:
    def mscale(m):
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    set_by_hand = read_number(given, "attention_factor", None, low=0)
    if set_by_hand is not None:
        return set_by_hand
    m, all_dim = read_number(given, "mscale", None), read_number(given, "mscale_all_dim", None)
    return mscale(m) / mscale(all_dim) if m and all_dim else mscale(1)


def scale_dynamic(dim, theta, given, context) -> RopeParams:
    """Dynamic NTK changes the rotation of *every* key beyond the trained context.

    A KV cache cannot follow that, so the context ends there (`limit`).
    """
    read_number(given, "factor", None, low=1e-6, required="dynamic")
    return RopeParams(dim, theta, "dynamic", limit=context)


def scale_longrope(dim, theta, given, context) -> RopeParams:
    """Phi-3's two sets of factors: one up to the original context, another beyond it, for *every* key.

    As with `dynamic`, a KV cache cannot follow that: the context ends where the first set does.
    """
    factors = given.get("short_factor")
    if not isinstance(factors, (list, tuple)) or not all(
        isinstance(f, (int, float)) and not isinstance(f, bool) and 0 < f < 1e30 for f in factors
    ):
        raise BadCheckpoint("config.json: rope scaling 'longrope' needs short_factor, numbers above 0")
    periods = scale_periods(theta, dim, factors)
    magnitude = read_number(given, "attention_factor", None, low=1e-6)
    if magnitude is None:
        factor = read_number(given, "factor", None, low=1e-6, required="longrope")
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    return RopeParams(dim, theta, "longrope", periods, magnitude=magnitude, limit=context)


KINDS = {
    "default": scale_default,
    "linear": scale_linear,
    "llama3": scale_llama3,
    "yarn": scale_yarn,
    "dynamic": scale_dynamic,
    "longrope": scale_longrope,
    "su": scale_longrope,  # its first name
    "proportional": scale_proportional,
}

# The keys of a scaling that are read; Qwen's mrope differs from RoPE for images only.
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
KEYS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor",
        "mscale", "mscale_all_dim",
    },
    "dynamic": {"factor", "original_max_position_embeddings"},
    "longrope": {"factor", "short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"},
    "proportional": {"factor"},
}  # fmt: skip
KEYS["su"] = KEYS["longrope"]
