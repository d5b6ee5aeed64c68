"""mlxrt with one token of every answer changed: a side whose fault is known. Started by test_command.py."""

from typing import Any

from mlxrt.bench.sides.ours import Ours
from mlxrt.bench.sides.serving import serve

PLACE = 2


class Liar(Ours):
    def generate(self, *args: Any, **options: Any) -> dict[str, Any]:
        reply = super().generate(*args, **options)
        tokens = list(reply["tokens"])
        if len(tokens) > PLACE:
            tokens[PLACE] = (tokens[PLACE] + 1) % 200
        return reply | {"tokens": tokens}


if __name__ == "__main__":
    serve(Liar)
