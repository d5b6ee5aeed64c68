"""`mlxrt bench` on a GPU machine, beside mlx-lm, with shapes instead of models: a JSON and an HTML file each.

    python -m bench.gpu.suites OUT [--shapes qwen3-0.6b@4bit,...] [--minutes 4]

Exit 0 when every run did what it was asked for; 1 when one gave a wrong token; 2 when one could not be measured.
"""

import argparse
import sys
from pathlib import Path

from mlxrt.cli import main as mlxrt

SUITES = ("decode", "prefill", "prefix", "batch", "kv")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="qwen3-0.6b@4bit,qwen3-8b@4bit,qwen3-30b-a3b@4bit")
    parser.add_argument("--minutes", default="4", help="for each shape")
    parser.add_argument("--kernels", action="store_true", help="the kernels suite too, once")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    worst = 0
    runs = [(shape, SUITES) for shape in options.shapes.split(",")]
    if options.kernels:
        runs.append((options.shapes.split(",")[0], ("kernels",)))
    for shape, suites in runs:
        stem = options.out / f"{shape.replace('@', '-')}-{'-'.join(suites) if len(suites) == 1 else 'all'}"
        files = ["--json", f"{stem}.json", "--html", f"{stem}.html", "--save", str(options.out / "results")]
        asked = ["bench", *suites, "-m", f"shape:{shape}", "--peer", "mlx-lm", "--minutes", options.minutes, *files]
        print("mlxrt", *asked, flush=True)
        worst = max(worst, mlxrt(asked))
    return worst


if __name__ == "__main__":
    sys.exit(main())
