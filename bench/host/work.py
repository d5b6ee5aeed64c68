"""The hot host paths as functions that can be repeated: each is set up once and called many times.

    python -m bench.host.work NAME COUNT

runs one of them COUNT times and nothing else, for `instructions.py` to count.
"""

import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlxrt  # before MLX
from mlxrt.cache import BlockPool, BlockTable, PrefixCache, SequenceState
from mlxrt.engine.kv_allocator import KVAllocator
from mlxrt.engine.request import Request, SamplingParams
from mlxrt.engine.scheduler import Limits, Scheduler
from mlxrt.engine.sequence import Sequence

Work = Callable[[], object]
BLOCK, VOCAB = 32, 32000


def schedule(rows: int = 16) -> Work:
    """One decode step of 16 running requests: plan, then commit their tokens."""
    pool = BlockPool(4096)
    empty = lambda: (BlockTable(pool, BLOCK),)  # noqa: E731
    scheduler = Scheduler(KVAllocator(empty, PrefixCache(empty, BLOCK)), Limits(length=1 << 30))
    params = SamplingParams(max_tokens=1 << 30)

    def fill() -> None:
        for i in range(rows):
            prompt = tuple(range(i, i + 64))
            scheduler.add(Request(tokens=prompt, params=params), prompt)

    def step() -> None:
        if not scheduler.running:
            fill()
        planned = scheduler.plan().step
        assert planned is not None
        for s in planned.slices:
            s.seq.pending.append((None, 0))
            scheduler.commit(s, 7)
        if len(next(iter(scheduler.running)).tokens) > 2000:  # short of the pool's end
            for seq in list(scheduler.running):
                scheduler.finish(seq, mlxrt.Finish.CANCELLED)

    return step


def prefix_hit(length: int = 5000) -> Work:
    """A prompt whose 5,000 tokens the prefix cache holds, looked up and pinned."""
    cache, tokens = filled_prefix_cache(length)
    prompt = [*tokens, 1]
    assert cache.resume(prompt) is not None
    return lambda: cache.resume(prompt)


def prefix_miss(length: int = 40_000) -> Work:
    """A prompt that shares 4 tokens with a cached one of 40,000."""
    cache, tokens = filled_prefix_cache(length)
    prompt = [*tokens[:4], *range(VOCAB, VOCAB + 500)]
    found = cache.resume(prompt)
    assert found is not None and len(found) == 4
    return lambda: cache.resume(prompt)


def filled_prefix_cache(length: int) -> tuple[PrefixCache, tuple[int, ...]]:
    pool = BlockPool(2 * length // BLOCK + 10)
    empty = lambda: (BlockTable(pool, BLOCK),)  # noqa: E731
    cache = PrefixCache(empty, BLOCK)
    tokens = tuple(i * 7919 % VOCAB for i in range(length))
    cache.insert(SequenceState(tokens, (BlockTable(pool, BLOCK).grow(length),)))
    return cache, tokens


def detokenize() -> Work:
    """64 tokens pushed through a byte-level detokenizer."""
    from mlxrt.text import Tokenizer

    folder = Path(tempfile.mkdtemp())
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_folder(folder)
    tokens = tokenizer.encode("Grüße, Ishmael: 海の上の白い鯨を見た。 " * 3)[:64]

    def push() -> str:
        stream = tokenizer.detokenizer()
        return "".join([stream.push(t) for t in tokens]) + stream.finish()

    return push


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def sample_greedy(rows: int = 16) -> Work:
    """The sampler's graph for 16 greedy rows, built but not evaluated: the host's share."""
    return sampler(rows, SamplingParams())


def sample_random(rows: int = 16) -> Work:
    """The same with temperature, top-k, top-p and penalties."""
    return sampler(rows, SamplingParams(temperature=0.8, top_k=40, top_p=0.9, presence_penalty=0.5, seed=1))


def sampler(rows: int, params: SamplingParams) -> Work:
    import mlx.core as mx

    from mlxrt.engine.logits import LogitsView
    from mlxrt.engine.sampler import sample

    logits = mx.zeros((rows, VOCAB))
    seqs = [Sequence(i, Request(tokens=(1, 2, 3), params=params), (1, 2, 3), seed=i) for i in range(rows)]

    def build() -> object:
        with LogitsView(logits, seqs) as view:
            return sample(view).tokens

    return build


def slices() -> Work:
    """A block written into a KV pool, and a slot sliced from it; the graph only."""
    import mlx.core as mx

    from mlxrt.cache.memory.slices import slice4, update

    pool, ids, block = mx.zeros((128, 8, 32, 64)), mx.array([17]), mx.zeros((1, 8, 32, 64))
    return lambda: slice4(update(pool, ids, block), 3, 1)


def header(tensors: int = 300) -> Work:
    """The header of a safetensors file with 300 tensors, read and checked."""
    from mlxrt.weights.formats.safetensors import read_header

    entries = {
        f"model.layers.{i}.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * i, 64 * i + 64]}
        for i in range(tensors)
    }
    text = json.dumps(entries).encode()
    path = Path(tempfile.mkdtemp()) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64 * tensors))
    return lambda: read_header(path)


WORK: dict[str, Callable[[], Work]] = {
    "schedule": schedule,
    "prefix_hit": prefix_hit,
    "prefix_miss": prefix_miss,
    "detokenize": detokenize,
    "sample_greedy": sample_greedy,
    "sample_random": sample_random,
    "slices": slices,
    "header": header,
}


def main() -> None:
    name, count = sys.argv[1], int(sys.argv[2])
    work = WORK[name]()
    for _ in range(count):
        work()


if __name__ == "__main__":
    main()
