"""What a JANG bundle says of itself: hints, compared with its tensors and believed only where those are silent.

Tensors cannot tell the seed of random signs nor whether rows were turned, so those two words count. Everything else
(format, profile, bits) is shown by `mlxrt info` and reported where it is wrong. Knows no layout.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ....errors import BadCheckpoint, shown
from ..quantized import FLOATS
from ..weight_format import Stored
from .jangtq import Coded

FILES = ("jang_config.json", "jjqf_config.json", "jang_cfg.json", "mxq_config.json")
EMBEDDED = ("jang_config", "jang")
SIDECAR = "jangtq_runtime.safetensors"
DROPS = ((r"\.importance$", "how it was quantised"), (r"^mtp\.", "drafts further tokens; nothing here does"))
SEED = 42


@dataclass(frozen=True)
class Jang:
    """A bundle's labels: jang_config.json, or the same inside config.json, and config.json itself."""

    labels: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def quantization(self) -> Mapping[str, Any]:
        given = self.labels.get("quantization")
        return given if isinstance(given, Mapping) else {}

    @property
    def hadamard(self) -> bool:
        """Whether rows were turned before quantising."""
        given = self.quantization.get("hadamard_rotation")
        if given is None or isinstance(given, bool):
            return bool(given)
        raise BadCheckpoint(f"jang_config.json: hadamard_rotation = {shown(given)}, expected true or false")

    @property
    def seed(self) -> int:
        """Of the signs of JANGTQ."""
        given = [place["mxtq_seed"] for place in (self.labels, self.config) if place.get("mxtq_seed") is not None]
        if not all(type(seed) is int and 0 <= seed < 1 << 63 for seed in given) or len(set(given)) > 1:
            raise BadCheckpoint(f"mxtq_seed must be one whole number; the bundle says {shown(given)}")
        return given[0] if given else SEED

    @property
    def profile(self) -> str | None:
        given = self.labels.get("profile") or self.quantization.get("profile")
        return given if isinstance(given, str) else None

    @property
    def format(self) -> str | None:
        """As the labels have it."""
        given = [place.get(key) for place in (self.labels, self.config) for key in ("format", "weight_format")]
        return next((word for word in given if isinstance(word, str)), None)

    def contradictions(self, stored: Mapping[str, Stored]) -> Iterable[str]:
        """A line for every label that the tensors refute."""
        coded = {p: x for p, x in stored.items() if isinstance(x, Coded) and x.coding.name == "jangtq"}
        said = self.format
        if coded and said not in (None, "jangtq", "mxtq", "jang", "jang_v2", "jang-v2"):
            yield f"the labels say {shown(said)}, {len(coded)} modules are JANGTQ; the tensors are used"
        if said in ("jangtq", "mxtq") and not coded:
            yield f"the labels say {shown(said)}, no module is JANGTQ; the tensors are used"
        widths = routed_widths(self.config.get("mxtq_bits", self.labels.get("mxtq_bits")))
        found = Counter((path.rpartition(".")[2], layout.bits) for path, layout in coded.items())
        for (name, bits), count in sorted(found.items()):
            if widths.get(name, bits) != bits:
                yield f"mxtq_bits says {widths[name]} for {name}, {count} modules have {bits}; the tensors are used"


def routed_widths(given: Any) -> dict[str, int]:
    """What mxtq_bits says of the experts' matrices."""
    routed = given.get("routed_expert") if isinstance(given, Mapping) else given
    names = ("gate_proj", "up_proj", "down_proj")
    if type(routed) is int:
        return dict.fromkeys(names, routed)
    return {n: routed[n] for n in names if type(routed.get(n)) is int} if isinstance(routed, Mapping) else {}


def jang_of(config: Mapping[str, Any]) -> Jang | None:
    """The labels in a config; folder.py has put the file's there."""
    for key in EMBEDDED:
        if key in config:
            if not isinstance(config[key], Mapping):
                raise BadCheckpoint(f"config.json: {key} must be an object, found {shown(config[key])}")
            return Jang(config[key], config)
    return None


def check_finite(arrays: Mapping[str, mx.array]) -> None:
    """Every float of a bundle is a number: a damaged one would make every answer NaN."""
    floats = {name: array for name, array in arrays.items() if array.dtype in FLOATS}
    fine = {name: mx.isfinite(array).all() for name, array in floats.items()}
    mx.eval(fine)
    if bad := sorted(name for name, ok in fine.items() if not ok.item()):
        raise BadCheckpoint(f"{shown(bad[0])} holds NaN or infinities; the file is damaged, download it again")
