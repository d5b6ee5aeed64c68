"""mlxrt against mlx-lm on this CPU, in one run: prefill, decode, import, shell to first token.

Exit 0: every judged figure holds. 1: not so. 2: a piece is missing.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlxrt
from mlxrt.bench import novel
from mlxrt.bench.export import export
from mlxrt.bench.launch import same_blas
from mlxrt.bench.machine import look_around

from . import speed, startup

PARTS = ("speed", "import", "shell")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of every speed measurement, at least 5")
    parser.add_argument("--starts", type=int, default=7, help="fresh processes per start-up measurement")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    options = parser.parse_args(arguments)
    if options.rounds < 5 or options.starts < 3:
        parser.error("an interval needs at least 5 rounds and 3 starts")
    options.part = options.part or list(PARTS)
    return options


def measure_speed(options: argparse.Namespace, found: dict[str, Any]) -> bool:
    folder = export("plain")
    with mlxrt.load(str(folder)) as engine:
        texts = engine.tokenizer.encode(novel.read_text()[:100_000], special=False)
    rows, library = speed.measure(folder, texts, options.rounds)
    shipped = speed.measure_default(export("packed"), texts)
    print(f"tokens per second, float32, {speed.DECODED} decoded, {options.rounds} rounds in turns, BLAS {library}")
    print("\n".join(speed.lines(rows)))
    print(
        f"mlx-lm as shipped, 4 bit weights, {shipped['prompt']} + {shipped['decoded']} tokens (not judged): "
        f"prefill {shipped['prefill_tps']:.2f}, decode {shipped['decode_tps']:.2f}"
    )
    found["speed"] = [row.to_dict() for row in rows]
    found["mlx_lm_as_shipped"] = shipped
    return speed.passed(rows)


def measure_starts(options: argparse.Namespace, found: dict[str, Any]) -> bool:
    waits = []
    for measure in start_measures(options):
        waits.append(measure())
        print(waits[-1], flush=True)
    found["starts"] = [w.to_dict() for w in waits]
    return all(w.passed for w in waits)


def start_measures(options: argparse.Namespace) -> Iterator[Callable[[], startup.Waits]]:
    if "import" in options.part:
        yield lambda: startup.measure_import(options.starts)
        yield lambda: startup.measure_load_import(options.starts)
    if "shell" in options.part:
        folder = export("plain")
        yield lambda: startup.measure_shell(folder, options.starts, same=False)
        if same_blas():
            yield lambda: startup.measure_shell(folder, options.starts, same=True)


def main() -> int:
    options = parse(sys.argv[1:])
    found: dict[str, Any] = {name: version(name) for name in ("mlx", "mlx-lm")}
    try:
        before = look_around()
        print(f"before: {before}")
        good = True
        if "speed" in options.part:
            good &= measure_speed(options, found)
        if {"import", "shell"} & set(options.part):
            good &= measure_starts(options, found)
    except mlxrt.MlxrtError as error:
        print(error, file=sys.stderr)
        return 2
    after = look_around()
    print(f"after: {after}")
    found |= {"before": before.to_dict(), "after": after.to_dict(), "passed": bool(good)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print("every judged figure holds" if good else "NOT every judged figure holds")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
