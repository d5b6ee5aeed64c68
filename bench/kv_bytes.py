"""Memory of keys and values, measured: coded kinds beside bfloat16, and a ragged batch beside the sum of its lengths.

    python -m bench.kv_bytes

Engines of a small model in bfloat16 read prompts; what counts is MLX's active memory after and before, not a formula.
"""

import gc

from mlxrt import Engine, EngineConfig, Request, SamplingParams

import mlx.core as mx  # isort: skip  after mlxrt, which brings a BLAS

from mlxrt.models import find
from mlxrt.weights.randomise import random_weights

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LIMITS = {"q8": 0.57, "q4": 0.32}


def model():
    family = find(CONFIG)
    made = family(family.parse(CONFIG))
    random_weights(made, None, mx.bfloat16)
    made.fuse()
    mx.eval(made.parameters())
    return made


def held(made, kv: str, lengths: list[int]) -> tuple[int, int]:
    """Bytes in places that prompts of these lengths hold while all of them run; bytes MLX has allocated for pools."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    engine = Engine(made, EngineConfig(kv=kv, prefix_cache=False, kv_memory="1G"))
    ids = [
        engine.submit(Request(tokens=[i % 60 for i in range(n)], params=SamplingParams(max_tokens=64))) for n in lengths
    ]
    done = set()
    while len(done) < len(ids):
        engine.step()
        done |= {id for id in ids if any(event.token is not None for event in engine.take(id))}
    now = engine.stats().kv_bytes
    mx.synchronize()
    allocated = mx.get_active_memory() - before
    engine.close()
    return now, allocated


def main() -> int:
    made, right = model(), True
    plain, allocated = held(made, "full", [4096])
    print(f"bfloat16, 4,096 tokens: {plain / 1e6:.2f} MB in places, {allocated / 1e6:.2f} MB allocated")
    for kind, limit in LIMITS.items():
        here, there = held(made, kind, [4096])
        right &= here <= limit * plain and there <= limit * allocated
        print(
            f"{kind}, 4,096 tokens: {here / 1e6:.2f} MB, {here / plain:.4f}x of bfloat16 (limit {limit}); "
            f"allocated {there / 1e6:.2f} MB, {there / allocated:.4f}x"
        )
    lengths = [6000] + [32] * 7
    ragged, _ = held(made, "full", lengths)
    per_token = 8 * 2 * 4 * 64 * 2
    share = ragged / (per_token * sum(lengths))
    right &= share <= 1.05
    print(f"one of 6,000 and seven of 32 tokens: {share:.3f}x of the sum of their lengths (limit 1.05; mlx-lm 8.0)")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
