"""`mlxrt bench`: engines compared on this machine, two runs compared, and the history of runs."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench import SUITES
from ..engine.threads import Interrupt
from ..errors import BadRequest
from .exit_status import INTERRUPTED
from .flags import Parser, parse_float, parse_int, parse_int_list
from .terminal import note

if TYPE_CHECKING:
    from ..bench.result import Report
    from ..bench.run import Plan

RANGES = {"minutes": (0.01, 1e4), "rounds": (1, 1000), "width": (0.1, 100), "level": (50, 99.9), "restarts": (0, 100)}
NOT_MEASURED = 2  # a suite, case or peer could not be measured; the others were
WRONG_TOKENS = 1  # an engine gave other tokens


def add_flags(parser: Parser) -> None:
    add, suites = parser.add_argument, "; ".join(f"{name}: {text}" for name, text in SUITES.items())
    add("words", nargs="+", metavar="SUITE", help=f"{suites}. Or: compare A.json B.json; history FOLDER")
    add("-m", "--model", metavar="MODEL", help="what `generate -m` takes (default: smollm2)")
    add("--peer", action="append", metavar="P", help="mlx-lm, llama.cpp, a URL, none; may repeat")
    add("--json", type=Path, metavar="FILE", help="write the report there, for scripts and `compare`")
    add("--html", type=Path, metavar="FILE", help="write the report there, with plots (needs mlxrt[bench])")
    add("--save", type=Path, metavar="FOLDER", help="keep the report in a history by machine")
    add("--lengths", type=parse_int_list, metavar="N,...", help="prompt lengths (default: by device)")
    add("--tokens", type=parse_int, metavar="N", help="tokens decoded per round (default: by device)")
    add("--minutes", type=parse_float, default=8.0, metavar="X", help="time for all suites (default: 8)")
    add("--rounds", type=parse_int, default=6, metavar="N", help="minimum number of rounds, time permitting")
    add("--width", type=parse_float, default=5.0, metavar="PERCENT", help="stop when intervals are this narrow")
    add("--level", type=parse_float, default=95.0, metavar="PERCENT", help="confidence level (default: 95)")
    add("--threads", type=parse_int, metavar="N", help="threads per engine on a CPU (default: free cores)")
    add("--requests", type=parse_int, metavar="N", help="requests of a batch (default: by device)")
    add("--restarts", type=parse_int, default=0, metavar="N", help="restarts of every engine within a case")
    add("--clock", choices=("wall", "processor"), help="default: wall; processor time on a busy CPU")
    add("--text", type=Path, metavar="FILE", help="text to cut prompts from (default: Moby-Dick)")
    add("--kv", metavar="KIND,...", help="KV cache kinds of suites kv and quality (default: q8,q4,k8v4)")


def run(args: argparse.Namespace) -> int:
    if args.words[0] in ("compare", "history"):
        return compare(args) if args.words[0] == "compare" else show_history(args)
    plan = make_plan(args)
    if args.html:
        from ..bench.plots import require_matplotlib

        require_matplotlib()
    from ..bench.result import Report
    from ..bench.run import run as measure

    report = Report()
    stopped = False
    with Interrupt(lambda: True) as interrupt:
        try:
            measure(plan, report, lambda: interrupt.requested)
        except KeyboardInterrupt:
            stopped = True
    write_report(args, report)
    if stopped:
        return INTERRUPTED
    return NOT_MEASURED if report.problems else WRONG_TOKENS if report.wrong else 0


def make_plan(args: argparse.Namespace) -> "Plan":
    from ..bench.bench_model import check_peer
    from ..bench.run import Plan
    from ..weights.source.alias import DEFAULT

    peers = args.peer and tuple(p for p in args.peer if p != "none")
    for name in peers or ():
        check_peer(name)
    for name, (low, high) in RANGES.items():
        if not low <= vars(args)[name] <= high:
            raise BadRequest(f"--{name} must be in {low:g}..{high:g}, not {vars(args)[name]:g}")
    for name, values in (("lengths", args.lengths), ("tokens", args.tokens), ("requests", args.requests)):
        found = values if isinstance(values, tuple) else (values,)
        if values is not None and any(not 2 <= n <= 1 << 24 for n in found):
            raise BadRequest(f"--{name} must be integers of at least 2, not {', '.join(map(str, found))}")
    sizes = {"lengths": args.lengths, "decoded": args.tokens, "width": args.width / 100, "level": args.level / 100}
    same = ("minutes", "rounds", "threads", "text", "requests", "clock", "restarts")
    options = sizes | {name: vars(args)[name] for name in same} | {"kv": args.kv and tuple(args.kv.split(","))}
    return Plan(tuple(args.words), args.model or DEFAULT, peers, **options)


def write_report(args: argparse.Namespace, report: "Report") -> None:
    from ..bench.table import format_report

    if args.json:
        report.save(args.json)
    if args.html:
        from ..bench.html import render_html

        args.html.write_text(render_html(report), encoding="utf-8")
    if args.save and report.figures:
        from ..bench.compare import save_to_history

        note(f"saved as {save_to_history(report, args.save)}")
    print("\n".join(format_report(report)))


def compare(args: argparse.Namespace) -> int:
    from ..bench.compare import compare_reports, format_changes
    from ..bench.result import Report

    if len(args.words) != 3:
        raise BadRequest(f"compare takes two reports, {len(args.words) - 1} given: mlxrt bench compare A.json B.json")
    before, after = (Report.load(Path(word)) for word in args.words[1:])
    print("\n".join(format_changes(before, after, compare_reports(before, after, args.level / 100))))
    return 0


def show_history(args: argparse.Namespace) -> int:
    from ..bench.compare import format_history

    if len(args.words) != 2:
        raise BadRequest("history takes one folder: mlxrt bench history bench/results")
    print("\n".join(format_history(Path(args.words[1]))))
    return 0
