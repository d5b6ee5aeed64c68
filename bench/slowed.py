"""mlxrt, slower by a known part: after every token it works on for so much of the time the token took. A seeded fault.

Setting: as `mlxrt.bench.sides.ours`, and {slower: 0.1}. Meant for `ahead` 0: a step in flight would hide the work.
"""

import time
from collections.abc import Iterator
from typing import Any

from mlxrt import Engine, Event, Request
from mlxrt.bench.sides.ours import Ours
from mlxrt.bench.sides.serving import serve


class Slowed(Ours):
    def __init__(self, setting: dict[str, Any]):
        super().__init__(setting)
        self.slower = setting["slower"]

    def events(self, engine: Engine, request: Request) -> Iterator[Event]:
        began = time.process_time()
        for event in super().events(engine, request):
            # Of the processor's time, not the clock's: on a busy machine that is mostly spent waiting for others.
            end = time.process_time()
            end += self.slower * (end - began)
            while time.process_time() < end:
                sum(range(100))
            yield event
            began = time.process_time()


if __name__ == "__main__":
    serve(Slowed)
