"""Runs a step: forward and sample. Launching returns at once; the tokens arrive when they are read.

A step is a pure function of arrays. Decode steps replace `live` and only read the pools, so they can be launched
ahead; a step that writes the pools first waits for the ones in the air, and so writes in place.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from ..cache.memory import TAIL, Batch, KVPools, Shared
from ..cache.memory.slices import ArrayCache, bucket
from ..kernels.cuda.graph import Driver
from ..models import CausalLM
from .batch import follow, inputs, place
from .cuda_graph import Replay
from .logits import LogitsView
from .sampler import Sampled, greedy_tokens, sample, takes_best
from .step import Slice, Step

log = logging.getLogger("mlxrt")

Decode = Callable[..., tuple[tuple[mx.array, ...], dict]]


@dataclass(frozen=True)
class Flight:
    """A step that is running."""

    slices: tuple[Slice, ...]  # those that sample
    sampled: Sampled | None
    prompted: int = 0  # tokens of prompts in it


@dataclass
class Tail:
    """The batch that is decoding, and what it has not yet written to the pools."""

    rows: tuple[int, ...]
    start: list[int]
    used: int = 0
    live: dict[int, tuple] = field(default_factory=dict)
    batch: Batch | None = None
    index: list[dict] = field(default_factory=list)
    kept: bool = False  # a checkpoint waits in it
    places: dict[int, list[int]] = field(default_factory=dict)  # a whole one: the blocks it is, by layer

    @property
    def whole(self) -> bool:
        """It is a block's worth, and begins where a block does."""
        return self.used == TAIL and not any(start % TAIL for start in self.start)

    @property
    def ends(self) -> bool:
        return self.used == TAIL - self.early or self.kept

    @property
    def early(self) -> int:
        """Tokens before TAIL at which it ends, for the next one to begin where a block does: in all rows or in none."""
        beyond = {start % TAIL for start in self.start}
        return beyond.pop() if len(beyond) == 1 else 0

    def goes_on(self, step: Step) -> bool:
        """Whether the step is the next one of this very batch."""
        at = [(s.seq.id, s.start) for s in step.slices]
        return at == [(row, start + self.used) for row, start in zip(self.rows, self.start)]


class Runner:
    def __init__(self, model: CausalLM, specs: list, pools: KVPools, compiled: bool):
        self.model, self.pools, self.groups = model, pools, pools.groups
        self.of = pools.group_of
        self.source = [s.layer if isinstance(s, Shared) else i for i, s in enumerate(specs)]
        self.tail: Tail | None = None
        self.held = ArrayCache()
        pure = all(g.spec.compiles for g in self.groups)
        self.compiled = compiled and pure
        self.decode = mx.compile(self.next) if self.compiled else self.next
        self.decode_best = mx.compile(self.next_best) if self.compiled else self.next_best
        self.head = mx.compile(model.logits) if self.compiled else model.logits
        self.replay = self.replaying() if self.compiled else None
        self.waits = 0  # steps that had to wait for the device
        self.positions = 0  # tokens run through the model

    def replaying(self) -> Replay | None:
        """Where decode steps can be launched without MLX: on CUDA, all memory read by kernels."""
        gpu = self.model.kernels.gpu
        if gpu is None or gpu.library is None or not all(g.spec.pages for g in self.groups):
            return None
        try:
            device = Driver(gpu.library)
        except (OSError, RuntimeError) as error:
            log.warning(f"decode steps are launched kernel by kernel: CUDA's driver cannot be used ({error})")
            return None
        return Replay(self.next_best, self.decode_best, self.model, gpu.library, device)

    def launch(self, step: Step) -> Flight:
        if step.decode and all(s.samples and takes_best(s.seq) for s in step.slices):
            tokens, told = self.run(step, self.decode_best)
            return self.fly(step, step.slices, Sampled(tokens, told, tuple(s.seq.id for s in step.slices), {}, {}))
        hidden = self.hidden(step)
        ends = [i for i, s in enumerate(step.slices) if s.samples]
        if not ends:
            mx.async_eval(self.tail.live if self.tail else ())
            return Flight((), None, step.prompted)
        slices = tuple(step.slices[i] for i in ends)
        rows = hidden if len(ends) == hidden.shape[0] else hidden[mx.array(ends)]
        with LogitsView(self.head(rows), [s.seq for s in slices]) as view:
            sampled = sample(view, self.model.kernels)
        return self.fly(step, slices, sampled)

    def fly(self, step: Step, slices: tuple[Slice, ...], sampled: Sampled) -> Flight:
        for i, s in enumerate(slices):
            s.seq.pending.append((sampled.tokens, i))
        live = self.tail.live if self.tail else ()
        mx.async_eval(sampled.arrays, live)  # at once: every call ends a batch of launches
        return Flight(slices, sampled, step.prompted)

    def hidden(self, step: Step, every: bool = False) -> mx.array:
        """The last hidden state of every row, or of `every` token."""
        if step.decode:
            return self.run(step, self.decode)[0][: len(step.slices)]
        return self.run(step, None, every)[0]

    def run(self, step: Step, decode: Decode | None, every: bool = False) -> tuple[mx.array, ...]:
        """What `decode` gives for every row; without it, the hidden states of a step of any kind."""
        rows = tuple(s.seq.id for s in step.slices)
        moved = self.pools.pending
        if self.tail and (not step.decode or moved or self.tail.ends or not self.tail.goes_on(step)):
            self.flush(goes_on=step.decode and not moved and self.tail.goes_on(step))
        if moved:
            self.wait()
            self.pools.apply_pending()
        tokens = inputs(step, bucket(len(rows)) if decode else 0)
        self.positions += sum(s.stop - s.start for s in step.slices)
        return self.ahead(step, rows, tokens, decode) if decode else (self.alone(step, tokens, every),)

    def forward(self, tokens, batch, index, pools, live):
        """The step itself: (hidden, pools, live) from arrays alone."""
        index = [dict(where) for where in index]  # layers leave there what they share, for this step only
        views = {i: self.groups[g].spec.view(batch, index[g], pools[i], live[i]) for i, g in self.of.items()}
        hidden = self.model(tokens, [views[i] for i in self.source])
        return hidden, {i: v.pool for i, v in views.items()}, {i: v.live for i, v in views.items()}

    def next(self, tokens, batch, index, pools, live):
        """A decode step: every row stands where its tail ends. It does not return pools, for it may not write them."""
        batch = batch._replace(positions=batch.start + batch.used)
        hidden, _, live = self.forward(tokens, batch, index, pools, live)
        return (hidden,), live

    def next_best(self, tokens, batch, index, pools, live):
        """The same where every row takes its best token: those, and which rows have none."""
        (hidden,), live = self.next(tokens, batch, index, pools, live)
        return greedy_tokens(self.model.logits(hidden), self.model.kernels), live

    def alone(self, step, tokens, every):
        """Rows of any length, packed. Writes the pools, so nothing else may be reading them."""
        self.wait()
        pools = self.pools
        batch, index = place(step, self.groups, [s.start for s in step.slices], 0, len(step.slices))
        batch = batch._replace(every=every)
        hidden, pools.arrays, _ = self.forward(tokens, batch, index, pools.arrays, dict.fromkeys(self.of, ()))
        mx.async_eval(pools.arrays)
        if every or hidden.shape[0] == len(step.slices):
            return hidden
        ends, n = [], 0
        for s in step.slices:
            n += s.stop - s.start
            ends.append(n - 1)
        return hidden[mx.array(ends)]

    def ahead(self, step, rows, tokens, decode):
        """One token a row, any number of steps in the air."""
        t = self.tail or Tail(rows, [s.start for s in step.slices])
        width = bucket(len(rows))
        t.batch, t.index = follow(step, self.groups, t.start, t.used, width, self.compiled, self.held)
        self.tail = t  # only now: a stale block raises above and must not leave half a tail
        pools = self.pools.arrays
        if not t.live:
            t.live = {i: self.groups[g].spec.open(pools[i], t.index[g], width, self.held) for i, g in self.of.items()}
        arrays = tokens, t.batch, t.index, pools, t.live
        replay = self.replay if decode is self.decode_best else None
        with self.model.kernels.capturing(replay is not None):
            made, t.live = decode(*arrays) if replay is None else replay(t.used, *arrays)
        t.used, t.kept = t.used + 1, step.checkpoint
        if replay is not None and t.whole and all(g.spec.size == TAIL for g in self.groups):
            t.places = self.places(step, t.start)
        return made

    def flush(self, goes_on: bool = False):
        """Write the tail to the pools; `goes_on`: the next step is the next one of this very batch."""
        t, self.tail = self.tail, None
        if t is None or t.batch is None:
            return
        if t.places and self.replay is not None and self.replay.keep(t.live, t.places, self.pools.block_bytes):
            return None if goes_on else self.wait()
        self.wait()
        batch, pools = t.batch._replace(used=mx.array([t.used])), self.pools.arrays
        for i, g in self.of.items():
            pools[i] = self.groups[g].spec.flush(pools.pop(i), t.live[i], batch, t.index[g], t.whole)
        mx.async_eval(pools)

    def places(self, step: Step, start: list[int]) -> dict[int, list[int]]:
        """The block of each row that begins there, by layer."""
        rows = list(zip((s.seq.parts for s in step.slices), start, strict=True))
        found = [[group.spec.place(parts[g], n) for parts, n in rows] for g, group in enumerate(self.groups)]
        return {i: found[g] for i, g in self.of.items()}

    def close(self):
        """Give the memory back."""
        self.wait()
        if self.replay is not None:
            self.replay.close()
            self.replay = None
        self.pools.clear()
        self.tail = None

    def wait(self):
        if self.replay is not None:
            self.replay.wait()
        mx.synchronize()
        self.waits += 1
