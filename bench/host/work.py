"""The hot host paths as pieces of work that can be repeated. Each is made once and called many times.

    python -m bench.host.work NAME COUNT

runs one of them COUNT times and nothing else: what `instructions.py` counts.
"""

import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlxrt  # before MLX
from mlxrt.cache import BlockPool, BlockTable, PrefixCache, SequenceState
from mlxrt.engine.request import Request, SamplingParams, Sequence
from mlxrt.engine.scheduler import Limits, Scheduler

Work = Callable[[], object]
BLOCK, VOCAB = 32, 32000


def schedule(rows: int = 16) -> Work:
    """One decode step of 16 running requests: plan, then commit their tokens."""
    pool = BlockPool(4096)
    empty = lambda: (BlockTable(pool, BLOCK),)  # noqa: E731
    scheduler = Scheduler(empty, PrefixCache(empty, BLOCK), Limits(length=1 << 30))
    params = SamplingParams(max_tokens=1 << 30)

    def fill() -> None:
        for i in range(rows):
            prompt = tuple(range(i, i + 64))
            scheduler.submit(Request(tokens=prompt, params=params), prompt)

    def step() -> None:
        if not scheduler.running:
            fill()
        planned = scheduler.plan()
        assert planned is not None
        for s in planned.slices:
            s.seq.pending.append((None, 0))
            scheduler.commit(s, 7)
        if len(scheduler.running[0].tokens) > 2000:  # short of the pool's end
            for seq in list(scheduler.running):
                scheduler.finish(seq, mlxrt.Finish.CANCELLED)

    return step


def look_up(length: int = 5000) -> Work:
    """A prompt of 5,000 tokens that the prefix store holds, found and pinned."""
    pool = BlockPool(2 * length // BLOCK + 10)
    store = PrefixCache(lambda: (BlockTable(pool, BLOCK),), BLOCK)
    tokens = tuple(i * 7919 % VOCAB for i in range(length))
    store.insert(SequenceState(tokens, (BlockTable(pool, BLOCK).grow(length),)))
    asked = [*tokens, 1]
    assert store.resume(asked) is not None
    return lambda: store.resume(asked)


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
    """The sampler's graph for 16 greedy rows, built and not computed: what the host pays."""
    return sampler(rows, SamplingParams())


def sample_drawn(rows: int = 16) -> Work:
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
    """A key of one token cut from and written into a cache of rank 4; the graph only."""
    import mlx.core as mx

    from mlxrt.cache.memory.slices import cut4, update4

    cache, value = mx.zeros((1, 8, 512, 64)), mx.zeros((1, 8, 1, 64))
    return lambda: update4(cache, 17, cut4(update4(cache, 100, value), 40, 1))


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
    "look_up": look_up,
    "detokenize": detokenize,
    "sample_greedy": sample_greedy,
    "sample_drawn": sample_drawn,
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
