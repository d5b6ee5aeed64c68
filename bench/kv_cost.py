"""What coded keys and values do to the default model's logits on Moby-Dick: within what docs/decisions/0013 allows?

    python -m bench.kv_cost [--window 1024] [--windows 4]

Every place of every window but the first 64 is judged against full keys and values: how far the distributions are
apart (KL, mean), how often the likeliest token is the same. Exit 0: within the limits. 1: beyond. 2: a piece is
missing.
"""

import argparse
import sys

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

from mlxrt.bench import novel

# kind: largest mean KL in nats, smallest share of places with the same likeliest token
LIMITS = {"q8": (0.002, 0.97), "q6": (0.02, 0.92), "k8v4": (0.03, 0.92), "q4": (0.3, 0.75)}
FIRST = 64


def scored(kind: str, windows: list[list[int]]) -> list[mx.array]:
    """Log probabilities of every judged place."""
    with mlxrt.load("smollm2", config=mlxrt.EngineConfig(kv=kind)) as engine:
        made = [engine.score(tokens)[FIRST:] for tokens in windows]
        made = [rows - mx.logsumexp(rows, axis=-1, keepdims=True) for rows in made]
        mx.eval(made)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=4)
    args = parser.parse_args()
    try:
        with mlxrt.load("smollm2") as engine:
            tokens = engine.tokenizer.encode(novel.read_text()[: 8 * args.window * args.windows], special=False)
    except mlxrt.MlxrtError as error:
        print(error, file=sys.stderr)
        return 2
    windows = [tokens[i * args.window : (i + 1) * args.window] for i in range(args.windows)]
    plain, right = scored("full", windows), True
    for kind, (most, least) in LIMITS.items():
        pairs = list(zip(plain, scored(kind, windows), strict=True))
        far = mx.concatenate([(mx.exp(a) * (a - b)).sum(axis=-1) for a, b in pairs])
        same = mx.concatenate([a.argmax(axis=-1) == b.argmax(axis=-1) for a, b in pairs])
        kl, share = far.mean().item(), same.mean().item()
        right &= kl <= most and share >= least
        nearly = mx.sort(far)[-far.size // 100].item()
        print(
            f"{kind}: KL {kl:.2g} nats (allowed {most}), 99 of 100 places below {nearly:.2g}; "
            f"same likeliest token {share:.1%} of {same.size} places (at least {least:.0%})",
            flush=True,
        )
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
