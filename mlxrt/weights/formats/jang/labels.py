"""JANG labels (jang_config.json): hints that are compared with the tensors.

Only the seed of random signs and the Hadamard rotation cannot be seen in tensors, so those two are believed. Format,
profile and bits are shown by `mlxrt info` and reported where they are wrong.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ....errors import BadCheckpoint, quote
from ....kernels.dtypes import FLOATS
from ..weight_format import WeightFormat
from .jangtq import LUTFormat

FILES = ("jang_config.json", "jjqf_config.json", "jang_cfg.json", "mxq_config.json")
EMBEDDED = ("jang_config", "jang")
SIDECAR = "jangtq_runtime.safetensors"
IGNORED_TENSORS = (
    (r"\.importance$", "calibration data of the quantiser"),
    (r"^mtp\.", "multi-token prediction, which is not supported"),
)
SEED = 42


@dataclass(frozen=True)
class JangLabels:
    """jang_config.json, or the same inside config.json, and config.json itself."""

    labels: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def quantization(self) -> Mapping[str, Any]:
        given = self.labels.get("quantization")
        return given if isinstance(given, Mapping) else {}

    @property
    def hadamard(self) -> bool:
        """Whether rows were rotated before quantising."""
        given = self.quantization.get("hadamard_rotation")
        if given is None or isinstance(given, bool):
            return bool(given)
        raise BadCheckpoint(f"jang_config.json: hadamard_rotation = {quote(given)}, expected true or false")

    @property
    def seed(self) -> int:
        """Of the signs of JANGTQ."""
        given = [source["mxtq_seed"] for source in (self.labels, self.config) if source.get("mxtq_seed") is not None]
        if not all(type(seed) is int and 0 <= seed < 1 << 63 for seed in given) or len(set(given)) > 1:
            raise BadCheckpoint(f"mxtq_seed must be one integer; the checkpoint says {quote(given)}")
        return given[0] if given else SEED

    @property
    def profile(self) -> str | None:
        given = self.labels.get("profile") or self.quantization.get("profile")
        return given if isinstance(given, str) else None

    @property
    def format(self) -> str | None:
        """As the labels name it."""
        given = [source.get(key) for source in (self.labels, self.config) for key in ("format", "weight_format")]
        return next((word for word in given if isinstance(word, str)), None)

    def contradictions(self, formats: Mapping[str, WeightFormat]) -> Iterable[str]:
        """A line for every label that the tensors contradict."""
        jangtq = {p: x for p, x in formats.items() if isinstance(x, LUTFormat) and x.coding.name == "jangtq"}
        claimed = self.format
        if jangtq and claimed not in (None, "jangtq", "mxtq", "jang", "jang_v2", "jang-v2"):
            yield f"the labels say {quote(claimed)}, {len(jangtq)} modules are JANGTQ; the tensors are used"
        if claimed in ("jangtq", "mxtq") and not jangtq:
            yield f"the labels say {quote(claimed)}, no module is JANGTQ; the tensors are used"
        claimed_bits = expert_bits(self.config.get("mxtq_bits", self.labels.get("mxtq_bits")))
        found = Counter((path.rpartition(".")[2], fmt.bits) for path, fmt in jangtq.items())
        for (name, bits), count in sorted(found.items()):
            if claimed_bits.get(name, bits) != bits:
                claim = f"mxtq_bits says {claimed_bits[name]} for {name}"
                yield f"{claim}, {count} modules have {bits}; the tensors are used"


def expert_bits(given: Any) -> dict[str, int]:
    """The bits of expert matrices in `mxtq_bits`."""
    routed = given.get("routed_expert") if isinstance(given, Mapping) else given
    names = ("gate_proj", "up_proj", "down_proj")
    if type(routed) is int:
        return dict.fromkeys(names, routed)
    return {n: routed[n] for n in names if type(routed.get(n)) is int} if isinstance(routed, Mapping) else {}


def read_labels(config: Mapping[str, Any]) -> JangLabels | None:
    """The labels in a config; folder.py puts those of jang_config.json there."""
    for key in EMBEDDED:
        if key in config:
            if not isinstance(config[key], Mapping):
                raise BadCheckpoint(f"config.json: {key} must be an object, found {quote(config[key])}")
            return JangLabels(config[key], config)
    return None


def check_finite(arrays: Mapping[str, mx.array]) -> None:
    """Refuse NaN and infinities: they would make all logits NaN."""
    floats = {name: array for name, array in arrays.items() if array.dtype in FLOATS}
    finite = {name: mx.isfinite(array).all() for name, array in floats.items()}
    mx.eval(finite)
    if bad := sorted(name for name, ok in finite.items() if not ok.item()):
        raise BadCheckpoint(f"{quote(bad[0])} holds NaN or infinities; the file is damaged, download it again")
