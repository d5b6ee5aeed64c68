"""config.json and jang_config.json of a converted model, with the keys that other readers need.

Our own loader needs only the seed and the norm flag of these: it looks at the tensors.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from .encode import SEED
from .recipe import Encoding, Recipe
from .tensors import SourceModel

# Keys of the source's config.json about its own weight format.
FORMAT_KEYS = (
    "quantization", "quantization_config", "jang_config", "jang", "codebook_config", "mxtq_bits", "mxtq_seed",
    "weight_format", "jangtq", "jangt", "jang_mup_folded",
)  # fmt: skip


class EncodedTensor(Protocol):
    """A tensor and its encoding."""

    @property
    def name(self) -> str: ...
    @property
    def encoding(self) -> Encoding: ...


def affine_entries(source: SourceModel, tensors: Iterable[EncodedTensor]) -> dict[str, dict[str, Any]]:
    """Bits and group size of every affine module, under its stored name."""
    return {
        source.stored_name(tensor.name).removesuffix(".weight"): {
            "group_size": tensor.encoding.group_size,
            "bits": tensor.encoding.bits,
            "mode": tensor.encoding.mode,
        }
        for tensor in tensors
        if tensor.encoding.kind in ("affine", "copied")
    }


def make_config(source: SourceModel, recipe: Recipe, tensors: Iterable[EncodedTensor]) -> dict[str, Any]:
    tensors = list(tensors)
    config = {key: value for key, value in source.raw.items() if key not in FORMAT_KEYS}
    entries = affine_entries(source, tensors)
    if entries:
        found = Counter((e["group_size"], e["bits"], e["mode"]) for e in entries.values())
        group, bits, mode = found.most_common(1)[0][0]
        bits = bits if recipe.format == "mlx" else min(e["bits"] for e in entries.values())
        config["quantization"] = {"group_size": group, "bits": bits, "mode": mode, **entries}
    if recipe.format == "jangtq":
        config |= {"weight_format": "mxtq", "mxtq_seed": SEED, "mxtq_bits": mxtq_bits(tensors)}
    if recipe.dtype is not None:
        config |= {"torch_dtype": recipe.dtype} | ({"dtype": recipe.dtype} if "dtype" in config else {})
    return config | source.norm_flag()


def mxtq_bits(tensors: Iterable[EncodedTensor]) -> dict[str, Any]:
    jangtq = {t.name.split(".")[-2]: t.encoding.bits for t in tensors if t.encoding.kind == "jangtq"}
    return {"routed_expert": jangtq, "attention": 8, "shared_expert": 8, "embed_tokens": 8, "lm_head": 8}


def make_jang_config(
    source: SourceModel, recipe: Recipe, tensors: Iterable[EncodedTensor], bits_per_weight: float, name: str
) -> dict[str, Any]:
    tensors = list(tensors)
    used = sorted({tensor.encoding.bits for tensor in tensors if tensor.encoding.kind in ("affine", "jangtq")})
    quantization: dict[str, Any] = {
        "profile": recipe.name,
        "actual_bits": round(bits_per_weight, 3),
        "bit_widths_used": used,
        "quantization_backend": "mx.quantize",
        "hadamard_rotation": recipe.hadamard,
        "tensor_quantization_manifest": manifest(source, tensors),
    }
    common = {"source_model": {"name": name}, "converter": "mlxrt", "quantization": quantization}
    if recipe.format == "jangtq":
        own = {"version": 2, "weight_format": "mxtq", "profile": recipe.name, "mxtq_seed": SEED}
        return {**own, "mxtq_bits": mxtq_bits(tensors), "routed_expert_layout": "prestacked", **common}
    if recipe.format == "codebook":
        quantization |= {"codebook_vq": True, "codebook_group_size": recipe.length, "n_codes": recipe.codebook_size}
    return {"format": "jang", "format_version": "2.0", **common}


def manifest(source: SourceModel, tensors: Iterable[EncodedTensor]) -> dict[str, Mapping[str, Any]]:
    entries = affine_entries(source, tensors)
    keys = ("weight", "scales", "biases")
    return {
        path: {"bits": e["bits"], "group_size": e["group_size"], **{f"{k}_key": f"{path}.{k}" for k in keys}}
        for path, e in entries.items()
    }
