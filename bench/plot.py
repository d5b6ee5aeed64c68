"""Draws README's plot, docs/img/decode.png, from bench/results/decode-h200.json.

python -m bench.plot
"""

import json
from pathlib import Path

from mlxrt.bench.plots import COLOURS, new_plot, require_matplotlib

ROOT = Path(__file__).resolve().parent.parent
DATA, IMAGE = ROOT / "bench" / "results" / "decode-h200.json", ROOT / "docs" / "img" / "decode.png"
ENGINES = {"mlxrt": COLOURS[0], "mlx-lm": "#9aa4ad"}


def main() -> None:
    require_matplotlib()
    found = json.loads(DATA.read_text(encoding="utf-8"))
    rows = found["rows"][::-1]  # the first on top
    axes = new_plot(f"{found['title']} ({found['date']})", found["unit"], "", (7.6, 3.2))
    for i, (name, colour) in enumerate(ENGINES.items()):
        positions = [row + 0.2 - 0.4 * i for row in range(len(rows))]
        bars = axes.barh(positions, [row[name] for row in rows], 0.36, color=colour, label=name)
        labels = [f"{row[name]:,}" + (f"  ({row['mlxrt'] / row['mlx-lm']:.1f}x)" if i == 0 else "") for row in rows]
        axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_yticks(range(len(rows)), [row["model"] for row in rows])
    axes.set_xlim(right=1.18 * max(row["mlxrt"] for row in rows))
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower right", frameon=False)
    IMAGE.parent.mkdir(exist_ok=True)
    axes.figure.savefig(IMAGE, dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    main()
