"""Reports kept by machine: a folder a machine, a file a run. What a figure did over time is read from there."""

import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import BadRequest
from .result import OURS, Report


def machine_name(report: Report) -> str:
    """Short, and the same for the same machine: processor or device, cores."""
    ours = report.sides.get(OURS, {})
    device = ours.get("device_name") or report.machine.get("processor") or "machine"
    return plain(f"{report.machine.get('name', 'machine')}-{device}")


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def keep(report: Report, folder: Path) -> Path:
    day = plain(report.created.replace("+00:00", "z"))
    path = folder / machine_name(report) / f"{day}-{plain(Path(str(report.model['name'])).name)}.json"
    report.save(path)
    return path


def lines(folder: Path) -> Iterator[str]:
    """Every figure's medians of mlxrt, run by run, oldest first."""
    if not folder.is_dir():
        raise BadRequest(f"{folder} is no folder; `mlxrt bench ... --save FOLDER` makes one")
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise BadRequest(f"{folder} holds no reports")
    series: dict[tuple[str, str], dict[str, list[str]]] = {}
    for report in (Report.load(path) for path in files):
        place = (machine_name(report), str(report.model.get("name")))
        for f in report.figures:
            if OURS in f.sides:
                ratios = "".join(f" {peer} {r.value:.2f}" for peer, r in f.ratios.items())
                told = f"{report.created[:16]} {f.sides[OURS].median:.4g} {f.unit}{ratios}"
                series.setdefault(place, {}).setdefault(f.name, []).append(told)
    for (machine, model), figures in series.items():
        yield f"{machine}, {model}"
        for name, runs in figures.items():
            yield f"  {name}: " + "; ".join(runs)
