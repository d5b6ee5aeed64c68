"""Recipe: how each tensor is encoded, from the format, JANG's profiles and the user's rules. Names and shapes only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import BadRequest, quote
from ...kernels.dtypes import DTYPES
from ..formats.quantized import AFFINE_BITS, AFFINE_GROUPS, MLXFormat

FORMATS = ("mlx", "jang", "jangtq", "codebook")
UNQUANTIZED_BITS = 16  # --bits 16: floats, as in the source
# Bits of the most, less and least sensitive tensors.
TIERS = {
    "1L": (8, 8, 2), "2S": (6, 4, 2), "2M": (8, 4, 2), "2L": (8, 6, 2), "3S": (6, 3, 3), "3M": (8, 3, 3),
    "3L": (8, 4, 3), "4S": (6, 4, 4), "4M": (8, 4, 4), "4L": (8, 6, 4), "6M": (8, 6, 6),
}  # fmt: skip
# Bits of gate and up, of down.
JANGTQ_BITS = {"JANGTQ1": (1, 1), "JANGTQ2": (2, 2), "JANGTQ3": (3, 3), "JANGTQ4": (4, 4), "JANGTQ_K": (2, 4)}
CRITICAL = re.compile(r"\.(q|k|v|o|qkv)_proj\.|(^|\.)lm_head\.|\.shared_expert\.|kv_[ab]_proj|q_[ab]_proj")
IMPORTANT = re.compile(r"embed_tokens|\.linear_attn\.")
MLP = re.compile(r"\.(gate|up|down)_proj\.weight$")
UNQUANTIZED = re.compile(r"\.(gate|router|proj_router|shared_expert_gate|conv1d)\.weight$|\.router\.|norm")
MANY_EXPERTS, MOST_EXPERTS = 150, 256


@dataclass(frozen=True)
class Encoding:
    """How one tensor is stored."""

    kind: str  # plain, affine, jangtq, codebook or copied
    bits: int = 16
    group_size: int = 64
    mode: str = "affine"  # of affine and copied ones

    @property
    def stored_bits(self) -> float:
        """Per weight, with the scales and biases of its group."""
        if self.kind not in ("affine", "copied"):
            return self.bits
        return self.bits + (32 if self.mode == "affine" else 8) / self.group_size


PLAIN = Encoding("plain")


@dataclass(frozen=True)
class Recipe:
    """A format with its options, validated. `experts` is the number per layer, 0 for dense models."""

    format: str
    bits: int | None = None
    group: int | None = None
    profile: str | None = None
    rules: tuple[tuple[str, Mapping[str, Any] | None], ...] = ()  # (pattern, bits and group_size; None: plain)
    hadamard: bool = False
    experts: int = 0
    length: int = 8  # of codebook vectors
    codebook_size: int = 1 << 14  # maximum number of codebook vectors
    dtype: str | None = None  # of stored floats, of scales too; None: the source's

    def __post_init__(self) -> None:
        require(self.format in FORMATS, f"--format must be one of {', '.join(FORMATS)}, not {quote(self.format)}")
        widths = {"mlx": (*AFFINE_BITS, UNQUANTIZED_BITS), "jang": (), "jangtq": (1, 2, 3, 4, 8), "codebook": ()}
        allowed = widths[self.format]
        if self.bits is not None:
            require(bool(allowed), f"--bits does not apply to {self.format}; see --profile")
            require(self.bits in allowed, f"--bits must be one of {list(allowed)} for {self.format}, not {self.bits}")
        if self.group is not None:
            require(self.group in AFFINE_GROUPS, f"--group-size must be one of {list(AFFINE_GROUPS)}, not {self.group}")
        require(not self.rules or self.format == "mlx", f"rules apply to --format mlx, not to {self.format}")
        require(self.dtype in (None, *DTYPES), f"--dtype must be {', '.join(DTYPES)}, not {quote(self.dtype)}")
        require(
            self.dtype is None or self.format == "mlx",
            f"--dtype applies to --format mlx: {self.format} stores floats as float16",
        )
        require(not self.hadamard or self.format == "jang", f"--hadamard applies to --format jang, not {self.format}")
        if self.profile is not None:
            known = {"jang": [f"JANG_{t}" for t in TIERS], "jangtq": list(JANGTQ_BITS)}.get(self.format, [])
            require(bool(known), f"--profile does not apply to {self.format}; see --bits")
            require(
                self.profile in known,
                f"--profile {quote(self.profile)} is unknown; {self.format} has {', '.join(known)}",
            )
        require(self.bits is None or self.profile is None, "give --bits or --profile, not both")
        require(2 <= self.codebook_size <= 1 << 16, f"--codes must be between 2 and 65536, not {self.codebook_size}")
        require(self.length in (2, 4, 8, 16), f"--length must be 2, 4, 8 or 16, not {self.length}")

    @property
    def name(self) -> str:
        """The name of the profile, also where none was given."""
        if self.format == "jang":
            return self.profile or "JANG_4M"
        if self.format == "jangtq":
            return self.profile or f"JANGTQ{self.bits or 4}"
        return self.format

    def choose(self, name: str, shape: tuple[int, ...], stored: MLXFormat | None = None) -> Encoding:
        """The encoding of a tensor; `name` as in our models. `stored`: its format, where that is one of MLX's."""
        if stored is not None and self.copies(name):
            return Encoding("copied", stored.bits, stored.group_size, stored.mode)
        if len(shape) not in (2, 3) or not name.endswith(".weight") or UNQUANTIZED.search(name):
            return PLAIN
        choose = {"mlx": self.mlx, "jang": self.jang, "jangtq": self.jangtq, "codebook": self.codebook}
        return choose[self.format](name, shape)

    def is_odd(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a matrix stays plain for its width alone."""
        return self.choose(name, shape) == PLAIN and self.choose(name, (*shape[:-1], max(AFFINE_GROUPS))) != PLAIN

    def copies(self, name: str) -> bool:
        """Whether a matrix in one of MLX's formats stays as it is, bit for bit: where nothing else was asked for."""
        asked = self.bits is not None or self.group is not None or any(re.search(p, name) for p, _ in self.rules)
        return self.format == "mlx" and not asked

    def affine(self, bits: int, shape: tuple[int, ...], group: int | None = None) -> Encoding:
        """Affine with the largest group size that divides the rows, up to the requested one."""
        largest = group or self.group or (128 if self.format == "jang" and self.experts >= MANY_EXPERTS else 64)
        fits = [g for g in sorted(AFFINE_GROUPS, reverse=True) if g <= largest and shape[-1] % g == 0]
        return Encoding("affine", bits, fits[0]) if fits else PLAIN

    def mlx(self, name: str, shape: tuple[int, ...]) -> Encoding:
        for pattern, rule in self.rules:
            if re.search(pattern, name):
                return PLAIN if rule is None else self.affine(rule["bits"], shape, rule.get("group_size"))
        return PLAIN if self.bits == UNQUANTIZED_BITS else self.affine(self.bits or 4, shape)

    def jang(self, name: str, shape: tuple[int, ...]) -> Encoding:
        most, less, least = TIERS[self.name.removeprefix("JANG_")]
        if CRITICAL.search(name) or (self.experts and MLP.search(name) and ".experts." not in name):
            return self.affine(most, shape)
        if IMPORTANT.search(name):
            return self.affine(less, shape)
        if self.experts >= MOST_EXPERTS:  # with so many experts two bits are too few for gates
            least = max(least, 4 if ".gate_proj." in name else 3 if ".down_proj." in name else least)
        return self.affine(least, shape)

    def jangtq(self, name: str, shape: tuple[int, ...]) -> Encoding:
        if not self.is_bulk(name):
            return self.affine(8, shape, 64)
        first, last = JANGTQ_BITS.get(self.name, (self.bits or 4,) * 2)
        return Encoding("jangtq", last if ".down_proj." in name else first)

    def codebook(self, name: str, shape: tuple[int, ...]) -> Encoding:
        if not self.is_bulk(name) or shape[-1] % self.length:
            return self.affine(8, shape, 64)
        return Encoding("codebook", group_size=self.length)

    def is_bulk(self, name: str) -> bool:
        """Whether a tensor is of the bulk: routed experts, or in dense models the MLPs."""
        return bool(MLP.search(name)) and (".experts." in name if self.experts else ".mlp." in name)


def require(valid: bool, problem: str) -> None:
    if not valid:
        raise BadRequest(problem)


def read_rules(given: Mapping[str, Any]) -> tuple[tuple[str, Mapping[str, Any] | None], ...]:
    """Parse a rule file: {regex: {"bits": 4, "group_size": 64} or null, ...}; the first match of a name counts."""
    rules = []
    for pattern, rule in given.items():
        try:
            re.compile(pattern)
        except re.error as bad:
            raise BadRequest(f"rules: {quote(pattern)} is not a regular expression ({bad})") from None
        if rule is not None:
            valid = (
                isinstance(rule, Mapping) and set(rule) <= {"bits", "group_size"} and rule.get("bits") in AFFINE_BITS
            )
            if not valid or rule.get("group_size", 64) not in AFFINE_GROUPS:
                raise BadRequest(
                    f"rules: {quote(pattern)} must be null or have bits {list(AFFINE_BITS)} and group_size "
                    f"{list(AFFINE_GROUPS)}, found {quote(rule)}"
                )
        rules.append((pattern, rule))
    return tuple(rules)
