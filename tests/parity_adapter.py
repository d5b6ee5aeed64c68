"""mlxrt behind the three protocols of check_parity.py, driving the engine's own cache states.

    python ../shared/tools/parity/check_parity.py ../shared/fixtures/parity tests.parity_adapter:logits \
        --stepper tests.parity_adapter:Stepper --batch tests.parity_adapter:batch --only llama3,smollm2
"""

import tempfile
from functools import lru_cache
from itertools import count
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxrt
from mlxrt.cache import SequenceState
from mlxrt.cache.storage.snapshot import load_state, save_state
from mlxrt.engine.sequence import Sequence
from mlxrt.errors import CannotRewind

IDS = count(1 << 20)  # never those of the scheduler


@lru_cache(maxsize=2)
def opened(path, stamp):
    return mlxrt.load(path, mlxrt.EngineConfig(dtype="float32", kv_memory="512M"))


def engine_of(path):
    path = Path(path)
    stamp = path if path.is_file() else path / "config.json"  # a .gguf is one file
    return opened(str(path), stamp.stat().st_mtime_ns)


def logits(path, tokens):
    return np.array(engine_of(path).score(list(tokens)))


def batch(path, prompts, n):
    params = mlxrt.SamplingParams(max_tokens=n, ignore_eos=True)
    done = engine_of(path).generate([mlxrt.Request(tokens=tuple(p), params=params) for p in prompts])
    return [list(c.tokens) for c in done]


class Stepper:
    """One sequence, fed by hand. What the checker asks of it is what a session does with its state."""

    def __init__(self, path, engine=None):
        self.engine = engine or engine_of(path)
        self.engine.core.prefix_cache.clear()
        self.reset()

    def reset(self):
        self.engine.core.prefix_cache.clear()
        self.adopt((), self.engine.core.pools.empty_states(), 0)

    def adopt(self, tokens, parts, length):
        self.seq = Sequence(next(IDS), mlxrt.Request(tokens=(0,)), tuple(tokens), parts=parts, length=length)

    def computed(self):
        return self.engine.core.positions

    def feed(self, tokens):
        self.seq.tokens += tokens
        rows = self.engine.core.feed(self.seq, len(self.seq.tokens) - self.seq.length)
        return np.array(rows[-len(tokens) :])

    def trim(self, n):
        """What the state itself can be cut back to, else what the store has kept on the way."""
        keep = self.seq.tokens[: len(self.seq.tokens) - n]
        self.engine.core.allocator.cache_prefix(self.seq, partial=True)
        try:
            state = SequenceState(tuple(self.seq.tokens), self.seq.parts).rewind(len(keep))
        except CannotRewind:
            state = self.engine.state(keep)
        if state is None:  # nothing kept so early: from the start, and `computed` tells
            self.adopt(keep, self.engine.core.pools.empty_states(), 0)
        else:
            self.adopt(keep, state.parts, len(state))
        return True

    def fork(self):
        other = object.__new__(Stepper)
        other.engine = self.engine
        self.engine.core.runner.flush()  # a recurrent state taken while it runs is not in the pool yet
        self.engine.core.allocator.cache_prefix(self.seq, partial=True)
        other.adopt(self.seq.tokens, self.seq.parts, self.seq.length)
        return other

    def roundtrip(self):
        engine, state = self.engine, SequenceState(tuple(self.seq.tokens), self.seq.parts)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            engine.core.runner.flush()
            save_state(path, engine.core.pools, state, engine.core.identity(), {})
            mx.synchronize()
            self.reset()
            state, _ = load_state(path, engine.core.pools, engine.core.pools.empty_states(), engine.core.identity())
        self.adopt(state.tokens, state.parts, len(state))
