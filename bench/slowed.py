"""mlxrt, slower by a known part: its clocks run fast, so every token takes exactly so much longer. A seeded fault.

Work added between tokens would not do: on a busy machine it costs half as much again in caches and wake-ups, and the
fault would be larger than it says.

Setting: as `mlxrt.bench.sides.ours`, and {slower: 0.1}.
"""

from typing import Any

from mlxrt.bench.sides.ours import Ours
from mlxrt.bench.sides.serving import serve


class Slowed(Ours):
    def __init__(self, setting: dict[str, Any]):
        super().__init__(setting)
        self.slower = setting["slower"]

    def generate(self, *args: Any, **options: Any) -> dict[str, Any]:
        reply = super().generate(*args, **options)
        return reply | {clock: [(1 + self.slower) * t for t in reply[clock]] for clock in ("at", "used")}


if __name__ == "__main__":
    serve(Slowed)
