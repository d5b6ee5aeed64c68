"""`deterministic`: in any company the very tokens of a run alone, on this machine?

    python -m bench.gpu.deterministic [SHAPE ...] [--programs 20] [--seed 1] [--kv full,q8]

Programs of bench.gpu.replay: requests that come, end and are given up at any time. Random weights in bfloat16, whose
logits lie close together, so that a product rounded otherwise shows. Exit 1 on a difference. Without `deterministic`
tokens may differ there: how many do is shown beside it.
"""

import argparse
import sys

from bench.gpu.replay import main, play, program
from mlxrt import EngineConfig
from mlxrt.engine.engine import Engine, Source


def compare(model, shape: str, kv: str, args: argparse.Namespace) -> int:
    """How many tokens differ from those of runs alone."""
    sizes = dict(max_context=1024, max_running=64, kv=kv)
    configs = [EngineConfig(deterministic=True, **sizes), EngineConfig(prefix_cache=False, **sizes)]
    tokens, wrong = 0, [0, 0]
    for which, config in enumerate(configs):
        with (
            Engine(model, config, source=Source(shape)) as together,
            Engine(model, config, source=Source(shape)) as alone,
        ):
            for seed in range(args.seed, args.seed + args.programs):
                requests = program(seed, model.config.vocab_size)
                for request, many in zip(requests, play(together, requests), strict=True):
                    (one,) = play(alone, [request])
                    tokens += len(many) if which == 0 else 0
                    wrong[which] += sum(a != b for a, b in zip(many, one, strict=True))
    print(
        f"{shape}, {kv}: {args.programs} programs, {tokens} tokens: {wrong[0]} differ from a run alone; "
        f"{wrong[1]} without deterministic",
        flush=True,
    )
    return wrong[0]


if __name__ == "__main__":
    sys.exit(main(compare, __doc__))
