"""Whether the harness can be believed: the same engine twice must be equal, and one that is 10 % slower must be slower.

    python -m bench.aa [--repeats 20] [--slower 0.1] [--width 6] [--seconds 300]

Through the decode suite on a small model of random weights, an engine a process, on this machine as it is. Exit 0:
both hold (19 of 20 and 18 of 20, or the same parts of another number of repeats). 1: not so.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import mlxrt
from mlxrt.bench import machine
from mlxrt.bench.contest import PROCESSOR, WALL, Contest, Options
from mlxrt.bench.prompts import drawn
from mlxrt.bench.result import OURS
from mlxrt.bench.run import CLOCKS
from mlxrt.bench.side import Side
from mlxrt.bench.statistics import Patience, Ratio
from mlxrt.bench.subject import Subject
from mlxrt.bench.suites import cases

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "vocab_size": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
WIDEST = 0.08
OTHER = "again"


def write_model(folder: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlxrt.engine.load import outline
    from mlxrt.weights.random_models import random_weights

    model = outline(CONFIG)
    random_weights(model, None, mx.float32)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})  # type: ignore[arg-type]
    (folder / "config.json").write_text(json.dumps(CONFIG))


def compare(
    folder: Path, slower: float, patience: Patience, tokens: int, clock: str, restarts: int
) -> tuple[Ratio, bool]:
    """One repetition, with several processes of each: the ratio to the other side, and whether the tokens agreed."""
    setting = {"model": str(folder), "config": {"ahead": 0, "kv_memory": "64M"}}
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    program = "bench.slowed" if slower else "mlxrt.bench.sides.ours"
    sides = {OURS: Side(OURS, setting, program="mlxrt.bench.sides.ours", env=env)}
    try:
        sides[OTHER] = Side(OTHER, setting | ({"slower": slower} if slower else {}), program=program, env=env)
        options = Options((32,), tokens, patience)
        roof = {"copy_bytes_per_s": 1e9}  # nothing is judged by it here
        contest = Contest(Subject.find(str(folder)), sides, options, roof, drawn(CONFIG["vocab_size"], ""))
        contest.allowance, contest.clock, contest.restarts = patience.seconds, clock, restarts
        [case] = cases("decode", options)
        figure = next(iter(case.run(contest)))
    finally:
        for side in sides.values():
            side.abandon()
    assert figure.agreement is not None
    same = figure.agreement["equal"].get(OTHER) == figure.agreement["compared"].get(OTHER)
    return figure.ratios[OTHER], same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--slower", type=float, default=0.1, help="the part the seeded engine is slower by")
    parser.add_argument("--width", type=float, default=6.0, help="percent at which a comparison is sure enough")
    parser.add_argument("--seconds", type=float, default=300.0, help="most time of one comparison")
    parser.add_argument("--tokens", type=int, default=8, help="decoded in a round")
    parser.add_argument("--restarts", type=int, default=3, help="of both engines within a comparison")
    parser.add_argument("--clock", choices=("wall", "processor"), help="default: as `mlxrt bench` chooses it")
    options = parser.parse_args()
    patience = Patience(options.width / 100, 0.99, least=32, most=1500, seconds=options.seconds, hurried=32)
    before = machine.look_around()
    clock = PROCESSOR if (options.clock or ("processor" if before.busy else "wall")) == "processor" else WALL
    print(f"before: {before}; mlxrt {mlxrt.__version__}, clock: {CLOCKS[clock]}")
    equal = caught = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        for i in range(options.repeats):
            alike, same = compare(folder, 0.0, patience, options.tokens, clock, options.restarts)
            slow, same_slow = compare(folder, options.slower, patience, options.tokens, clock, options.restarts)
            held = alike.low <= 1 <= alike.high and alike.width <= WIDEST
            equal, caught = equal + held, caught + (slow.low > 1)
            told = f"width {alike.width:.1%}, {alike.rounds} rounds {'' if held else 'MISSED'}"
            seen = f"{slow.rounds} rounds {'' if slow.low > 1 else 'MISSED'}"
            print(f"{i + 1:3}  same {alike} {told:34} slower {slow} {seen}", flush=True)
            if not (same and same_slow):
                print("     the tokens of the same model differ", flush=True)
                return 1
    print(f"after: {machine.look_around()}")
    need = math.ceil(0.95 * options.repeats), math.ceil(0.9 * options.repeats)
    print(f"same: {equal} of {options.repeats} (at least {need[0]}); slower: {caught} of {options.repeats} ({need[1]})")
    return 0 if equal >= need[0] and caught >= need[1] else 1


if __name__ == "__main__":
    sys.exit(main())
