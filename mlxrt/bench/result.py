"""Figures and reports: what a benchmark run leaves behind, and its JSON file.

Knows the file's format and version, nothing of how a figure was measured.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cache.files import atomic_write
from ..errors import BadRequest
from .statistics import Ratio, Spread, StoppingRule, paired_ratio, percentiles

FORMAT, VERSION = "mlxrt-bench", 1
OURS = "mlxrt"
JSON_KEYS = {"engines": "sides", "backends": "sides", "roofline": "roof", "device_peak": "roof"}  # of version 1


@dataclass(frozen=True)
class Figure:
    """One quantity measured on one or more engines, interleaved. A ratio above 1 says that mlxrt is better."""

    suite: str
    case: str
    what: str
    unit: str
    higher: bool  # whether more is better
    engines: Mapping[str, Spread]
    ratios: Mapping[str, Ratio] = field(default_factory=dict)  # by peer
    roofline: float | None = None  # the best the device allows, in the figure's unit
    at: Mapping[str, float] = field(default_factory=dict)  # plot coordinates: context, flops a token, intensity
    percentiles: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    agreement: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.suite} / {self.case} / {self.what}"

    def roofline_share(self, engine: str) -> float | None:
        if self.roofline is None or engine not in self.engines:
            return None
        median = self.engines[engine].median
        return median / self.roofline if self.higher else self.roofline / median

    def to_dict(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "case": self.case,
            "what": self.what,
            "unit": self.unit,
            "higher_is_better": self.higher,
            JSON_KEYS["engines"]: {
                name: {"median": s.median, "quartiles": [s.low, s.high], "values": list(s.values)}
                | ({"share_of_roof": share} if (share := self.roofline_share(name)) is not None else {})
                for name, s in self.engines.items()
            },
            "ratios": {peer: ratio.to_dict() for peer, ratio in self.ratios.items()},
            JSON_KEYS["roofline"]: self.roofline,
            "at": dict(self.at),
            "percentiles": {name: dict(p) for name, p in self.percentiles.items()},
            "agreement": self.agreement,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Figure":
        engines = {}
        for name, s in d[JSON_KEYS["engines"]].items():
            low, high = s["quartiles"]
            engines[name] = Spread(s["median"], low, high, tuple(s["values"]))
        ratios = {}
        for peer, r in d["ratios"].items():
            ratios[peer] = Ratio(**{key: r[key] for key in ("value", "low", "high", "level", "rounds")})
        same = {key: d[key] for key in ("suite", "case", "what", "unit", "at", "percentiles", "agreement")}
        return cls(
            **same,
            higher=d["higher_is_better"],
            engines=engines,
            ratios=ratios,
            roofline=d[JSON_KEYS["roofline"]],
            notes=tuple(d["notes"]),
        )


def figure(
    suite: str,
    case: str,
    what: str,
    unit: str,
    values: Mapping[str, list[float]],
    *,
    higher: bool = True,
    level: float = StoppingRule.level,
    processes: int = 1,
    latencies: Mapping[str, list[float]] | None = None,
    **rest: Any,
) -> Figure:
    """Make a figure from every engine's rounds, with ratios where mlxrt is among them."""
    ratios = {}
    for peer, theirs in values.items():
        if peer == OURS or OURS not in values:
            continue
        n = min(len(values[OURS]), len(theirs))
        if n < 2:
            continue  # one value has no interval
        a, b = (values[OURS][:n], theirs[:n]) if higher else (theirs[:n], values[OURS][:n])
        ratios[peer] = paired_ratio(a, b, level, processes)
    tails = {name: percentiles(found) for name, found in (latencies or {}).items() if found}
    spreads = {name: Spread.of(found) for name, found in values.items() if found}
    return Figure(suite, case, what, unit, higher, spreads, ratios, percentiles=tails, **rest)


@dataclass
class Report:
    """A full run. Figures are added as they are measured, so that an interrupted run keeps what it has."""

    model: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    device_peak: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)  # the info of each, or why it is absent
    figures: list[Figure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    created: str = ""
    seconds: float = 0.0
    complete: bool = False

    @property
    def wrong(self) -> list[str]:
        """Answers that differ by more than rounding."""
        found = []
        for f in self.figures:
            wrong = [d for d in (f.agreement or {}).get("differences", ()) if d["wrong"]]
            found += [f"{f.suite} / {f.case}: {d['side']} differs at token {d['place']}" for d in wrong]
        return found

    def to_dict(self) -> dict[str, Any]:
        named = {JSON_KEYS.get(key, key): value for key, value in vars(self).items() if key != "figures"}
        return {"format": FORMAT, "version": VERSION} | named | {"figures": [f.to_dict() for f in self.figures]}

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, mode=0o644) as out:
            out.write((json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "Report":
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadRequest(f"{path} cannot be read as a report: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise BadRequest(f"{path} is not a report of `mlxrt bench`: its format is not {FORMAT!r}")
        if found.get("version") != VERSION:
            raise BadRequest(
                f"{path} is of version {found.get('version')!r}, this mlxrt reads {VERSION}; measure again"
            )
        try:
            figures = [Figure.from_dict(f) for f in found.pop("figures")]
            known = {key: found[JSON_KEYS.get(key, key)] for key in vars(cls()) if key != "figures"}
        except (KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f"{path} is damaged: {type(error).__name__} {error}") from None
        return cls(**known, figures=figures)
