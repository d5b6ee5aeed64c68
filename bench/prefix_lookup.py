"""Looking a prompt up in the prefix store, with one long sequence stored: ours, and mlx-lm's (quadratic, see facts).

python -m bench.prefix_lookup [--peer]
"""

import argparse
import statistics
import time

from mlxrt.cache import BlockPool, BlockTable, PrefixCache, SequenceState

SIZE = 32


def timed(work, n=9):
    spent = []
    for _ in range(n):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e3


def ours(length):
    pool = BlockPool(2 * length // SIZE + 10)
    store = PrefixCache(lambda: (BlockTable(pool, SIZE), BlockTable(pool, SIZE, window=1024, slack=48)), SIZE)
    tokens = tuple(i * 7919 % 50000 for i in range(length))
    store.put(
        SequenceState(
            tokens, (BlockTable(pool, SIZE).grow(length), BlockTable(pool, SIZE, window=1024, slack=48).grow(length))
        )
    )
    whole, short = [*tokens, 1], [*tokens[:4], *range(60000, 60000 + 500)]
    assert len(store.resume(whole)) == length and len(store.resume(short)) == 4
    return timed(lambda: store.resume(whole)), timed(lambda: store.resume(short))


def theirs(length):
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, LRUPromptCache

    cache = LRUPromptCache()
    tokens = [i * 7919 % 50000 for i in range(length)]
    cache.insert_cache("m", tokens, [KVCache()])
    mx.eval(mx.zeros(1))
    short = [*tokens[:4], *range(60000, 60500)]
    return timed(lambda: cache.fetch_nearest_cache("m", short), n=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    print(
        f"{'stored tokens':>14} {'all match, ms':>14} {'4 match, ms':>12}"
        + (f" {'mlx-lm 4 match, ms':>20}" if args.peer else "")
    )
    for length in (5_000, 10_000, 20_000, 40_000):
        hit, miss = ours(length)
        peer = f" {theirs(length):>20.1f}" if args.peer else ""
        print(f"{length:>14} {hit:>14.2f} {miss:>12.3f}{peer}", flush=True)


if __name__ == "__main__":
    main()
