"""mlxrt with a known fault, as a backend of the harness. Setting: as mlxrt's, and {fault, slower}.

"wrong token" changes one token of every answer. "slower" lets the clocks run fast, so that every token takes exactly
so much longer: work added between tokens would cost more on a busy machine, in caches and wake-ups.
"""

from typing import Any

from mlxrt.bench.backends.mlxrt import MlxrtBackend
from mlxrt.bench.backends.serve import serve

CHANGED_TOKEN = 2


class FaultyBackend(MlxrtBackend):
    def __init__(self, setting: dict[str, Any]):
        self.fault, self.slower = setting.pop("fault"), setting.pop("slower", 0.0)
        super().__init__(setting)

    def generate(self, *args: Any, **options: Any) -> dict[str, Any]:
        reply = super().generate(*args, **options)
        if self.fault == "slower":
            return reply | {clock: [(1 + self.slower) * t for t in reply[clock]] for clock in ("at", "used")}
        tokens = list(reply["tokens"])
        if len(tokens) > CHANGED_TOKEN:
            tokens[CHANGED_TOKEN] = (tokens[CHANGED_TOKEN] + 1) % 200
        return reply | {"tokens": tokens}


if __name__ == "__main__":
    serve(FaultyBackend)
