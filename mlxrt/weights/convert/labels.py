"""What a converted folder says of itself: config.json and jang_config.json, in the words other readers look for.

Our own loader needs none of it but the stamps and the seed: it asks the tensors.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .encode import SEED
from .recipe import Choice, Recipe
from .tensors import PlainModel

# What config.json said of how its own weights were stored.
OLD = ("quantization", "quantization_config", "jang_config", "jang", "codebook_config", "mxtq_bits", "mxtq_seed",
       "weight_format", "jangtq", "jangt", "jang_mup_folded")  # fmt: skip


class Stored(Protocol):
    """A tensor and how it is stored."""

    @property
    def name(self) -> str: ...
    @property
    def choice(self) -> Choice: ...


def affine_entries(plain: PlainModel, pieces: Iterable[Stored]) -> dict[str, dict[str, Any]]:
    """Bits and group of every affine module, under its stored name."""
    return {
        plain.stored_name(piece.name).removesuffix(".weight"): {
            "group_size": piece.choice.group,
            "bits": piece.choice.bits,
            "mode": "affine",
        }
        for piece in pieces
        if piece.choice.form == "affine"
    }


def config_text(plain: PlainModel, recipe: Recipe, pieces: Iterable[Stored]) -> dict[str, Any]:
    pieces = list(pieces)
    said = {key: value for key, value in plain.raw.items() if key not in OLD}
    entries = affine_entries(plain, pieces)
    if entries:
        common = Counter((e["group_size"], e["bits"]) for e in entries.values()).most_common(1)[0][0]
        bits = common[1] if recipe.format == "mlx" else min(e["bits"] for e in entries.values())
        said["quantization"] = {"group_size": common[0], "bits": bits, "mode": "affine", **entries}
    if recipe.format == "jangtq":
        said |= {"weight_format": "mxtq", "mxtq_seed": SEED, "mxtq_bits": mxtq_bits(pieces)}
    return said | plain.stamps()


def mxtq_bits(pieces: Iterable[Stored]) -> dict[str, Any]:
    coded = {piece.name.split(".")[-2]: piece.choice.bits for piece in pieces if piece.choice.form == "jangtq"}
    return {"routed_expert": coded, "attention": 8, "shared_expert": 8, "embed_tokens": 8, "lm_head": 8}


def labels_text(
    plain: PlainModel, recipe: Recipe, pieces: Iterable[Stored], bits_per_weight: float, source: str
) -> dict[str, Any]:
    pieces = list(pieces)
    used = sorted({piece.choice.bits for piece in pieces if piece.choice.form in ("affine", "jangtq")})
    quantization: dict[str, Any] = {
        "profile": recipe.name,
        "actual_bits": round(bits_per_weight, 3),
        "bit_widths_used": used,
        "quantization_backend": "mx.quantize",
        "hadamard_rotation": recipe.hadamard,
        "tensor_quantization_manifest": manifest(plain, pieces),
    }
    same = {"source_model": {"name": source}, "converter": "mlxrt", "quantization": quantization}
    if recipe.format == "jangtq":
        own = {"version": 2, "weight_format": "mxtq", "profile": recipe.name, "mxtq_seed": SEED}
        return {**own, "mxtq_bits": mxtq_bits(pieces), "routed_expert_layout": "prestacked", **same}
    if recipe.format == "codebook":
        quantization |= {"codebook_vq": True, "codebook_group_size": recipe.length, "n_codes": recipe.codes}
    return {"format": "jang", "format_version": "2.0", **same}


def manifest(plain: PlainModel, pieces: Iterable[Stored]) -> dict[str, Mapping[str, Any]]:
    entries = affine_entries(plain, pieces)
    keys = ("weight", "scales", "biases")
    return {
        path: {"bits": e["bits"], "group_size": e["group_size"], **{f"{k}_key": f"{path}.{k}" for k in keys}}
        for path, e in entries.items()
    }
