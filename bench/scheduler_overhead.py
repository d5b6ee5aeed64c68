"""What the scheduler costs: plan and commit, per sequence and step, with many sequences running. No model, no device.

    python -m bench.scheduler_overhead [--sequences 256] [--steps 200] [--limit 50]

Exit 1 where a median over the steps is above the limit (microseconds per sequence).
"""

import argparse
import random
import statistics
import sys
import time

from mlxrt.cache.blocks import BlockPool
from mlxrt.cache.layer_state import BlockTable, LayerState, RecurrentState
from mlxrt.cache.prefix_cache import PrefixCache
from mlxrt.engine.request import Request, SamplingParams
from mlxrt.engine.scheduler import Limits, Scheduler

SIZE = 32  # tokens of a block


def layers(name: str, blocks: int):
    """What one sequence holds, per group of layers."""
    full, window, slot = BlockPool(blocks), BlockPool(blocks), BlockPool(blocks)
    made: dict[str, tuple[LayerState, ...]] = {
        "full": (BlockTable(full, SIZE),),
        "window and full": (BlockTable(full, SIZE), BlockTable(window, SIZE, 512, 48)),
        "recurrent and full": (BlockTable(full, SIZE), RecurrentState(slot, SIZE)),
    }
    return lambda: made[name]


def measure(name: str, sequences: int, steps: int, arriving: bool) -> list[float]:
    """Microseconds per running sequence of each step; with `arriving`, requests end and come all the time."""
    empty = layers(name, 1 << 16)
    scheduler = Scheduler(empty, PrefixCache(empty, SIZE), Limits(running=sequences, chunk=2048, length=1 << 20))
    chance = random.Random(0)

    def submit(n: int) -> None:
        length = chance.randrange(100, 300)
        prompt = tuple(chance.randrange(50_000) for _ in range(length))
        scheduler.submit(Request(tokens=prompt, params=SamplingParams(max_tokens=n)), prompt)

    for _ in range(sequences):
        submit(chance.randrange(40, 200) if arriving else 1 << 20)
    while len(scheduler.streams) < sequences * 0.9 or scheduler.prompts:
        step = scheduler.plan()
        assert step
        land(scheduler, step)
        while arriving and len(scheduler.waiting) < 8:
            submit(200)
        if arriving and len(scheduler.streams) >= sequences * 0.9:
            break
    found = []
    for _ in range(steps):
        began = time.process_time()
        step = scheduler.plan()
        assert step
        land(scheduler, step)
        found.append(1e6 * (time.process_time() - began) / len(scheduler.running))
        while arriving and len(scheduler.waiting) < 8:
            submit(200)
    return found


def land(scheduler: Scheduler, step) -> None:
    """The step's tokens arrive."""
    for s in step.slices:
        if s.samples:
            s.seq.pending.append((None, 0))
            scheduler.commit(s, 7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=float, default=50.0)
    options = parser.parse_args()
    good = True
    for name in ("full", "window and full", "recurrent and full"):
        for arriving in (False, True):
            found = measure(name, options.sequences, options.steps, arriving)
            median, high = statistics.median(found), sorted(found)[int(0.95 * len(found))]
            good &= median < options.limit
            what = "requests come and go" if arriving else "a stable batch"
            print(
                f"{name:18}  {what:20}  {options.sequences} sequences: {median:5.1f} us a sequence and step "
                f"(95 %: {high:5.1f}; at most {options.limit:.0f})"
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
