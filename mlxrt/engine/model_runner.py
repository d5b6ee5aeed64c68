"""The model runner: forward pass and sampling of one step. Launching returns at once; tokens arrive when they are read.

A step is a pure function of arrays. Decode steps write their keys and values to the decode tail, a small block per row
beside the pools, and only read the pools: so they can be launched ahead. A step that writes the pools first waits for
those in flight, and so writes in place.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.memory import TAIL, Batch, KVPools, LayerView, Shared, TailSpan
from ..cache.memory.slices import ArrayCache, bucket
from ..kernels.cuda.graph import Driver
from ..models import CausalLM
from .batch import RECENT, decode_batch, draw_batch, input_tokens, prefill_batch, step_of_tail
from .cpu_step import StepRecorder, Tails
from .cuda_graph import CudaGraphRunner, TailPieces, UnsampledStep
from .logits import LogitsView
from .sampler import (
    GrammarMasks,
    Sampled,
    draw_row,
    greedy_tokens,
    has_callback,
    is_greedy_alone,
    is_penalised,
    logprob_counts,
    run_draw_step,
    sample,
)
from .sequence import Sequence, Slice, Step

log = logging.getLogger("mlxrt")

DecodeFn = Callable[..., tuple[tuple[mx.array, ...], dict]]
MAX_AHEAD = 8  # steps in flight, see EngineConfig.ahead


@dataclass(frozen=True)
class InflightStep:
    """A launched step whose tokens are not read yet."""

    slices: tuple[Slice, ...]  # those that sample
    sampled: Sampled | None
    prefill_tokens: int = 0
    rows: tuple[Slice, ...] = ()  # all of a step with prompt tokens
    finite: mx.array | None = None  # of such a step: of every token, or of each row's last, whether it is finite
    draw: "Callable[[GrammarMasks], Sampled] | None" = None  # sampling that waits for the tokens before: see `sample`

    @property
    def only_first_tokens(self) -> bool:
        """Whether no row that samples has generated a token before."""
        return all(s.start < len(s.seq.prompt) for s in self.slices)

    def overflows(self) -> list[Slice]:
        """Chunks of prompts with a hidden state that is NaN or infinite. Waits."""
        if self.finite is None:
            return []
        finite: Any = self.finite.tolist()
        n, found = 0, []
        by_row = len(finite) == len(self.rows)
        for s in self.rows:
            size = 1 if by_row else s.stop - s.start
            if s.is_chunk and not all(finite[n : n + size]):
                found.append(s)
            n += size
        return found


@dataclass
class DecodeTail:
    """The decoding batch and its newest tokens, up to TAIL per row, which are not in the pools yet."""

    rows: tuple[int, ...]
    start: list[int]
    used: int = 0
    live: dict[int, tuple] = field(default_factory=dict)
    batch: Batch | None = None
    index: list[dict] = field(default_factory=list)
    checkpoint: bool = False  # a state inside it will be cached
    pieces: list[TailPieces] = field(default_factory=list)  # where the tail goes, by group, once it must be flushed
    draws: dict | None = None  # what the draw op is told of the rows, for all steps of the tail

    @property
    def is_block(self) -> bool:
        """Whether every row's tail is exactly one block."""
        return self.used == TAIL and not any(start % TAIL for start in self.start)

    @property
    def must_flush(self) -> bool:
        return self.used == self.size or self.checkpoint

    @property
    def size(self) -> int:
        """Tokens that it has when it is flushed, at the latest."""
        return TAIL - self.early

    @property
    def span(self) -> TailSpan:
        return TailSpan(self.start, self.used, self.size)

    @property
    def early(self) -> int:
        """How early to flush so that the next tail is block-aligned; 0 unless all rows share one offset."""
        beyond = {start % TAIL for start in self.start}
        return beyond.pop() if len(beyond) == 1 else 0

    def lacks(self, draws: bool) -> bool:
        """Whether it began without what the draw op must know: with a prompt's tokens, one in a step."""
        return draws and self.draws is None and self.used > 0

    def continues(self, step: Step) -> bool:
        """Whether the step is the next one of this very batch."""
        at = [(s.seq.id, s.start) for s in step.slices]
        return at == [(row, start + self.used) for row, start in zip(self.rows, self.start)]


class ModelRunner:
    """`graph_bytes`: the most memory that captured CUDA graphs may keep (None: their default, 0: none are made)."""

    def __init__(self, model: CausalLM, specs: list, pools: KVPools, compiled: bool, graph_bytes: int | None = None):
        self.model, self.pools, self.groups, self.group_of = model, pools, pools.groups, pools.group_of
        self.kv_layer = [s.layer if isinstance(s, Shared) else i for i, s in enumerate(specs)]  # whose view it reads
        self.tail: DecodeTail | None = None
        self.arrays = ArrayCache()
        self.compiled = compiled and all(g.spec.compiles for g in self.groups)
        self.decode_fn = mx.compile(self.decode_step) if self.compiled else self.decode_step
        self.sample_fn = mx.compile(self.sample_step) if self.compiled else self.sample_step
        self.logits_fn = mx.compile(self.logits_step) if self.compiled else self.logits_step
        if model.kernels.cpu is not None and all(g.spec.pages for g in self.groups):
            tails = Tails()
            record = lambda step: StepRecorder(step, model, self.group_of, tails)  # noqa: E731
            self.decode_fn, self.sample_fn = record(self.decode_step), record(self.sample_step)
        self.lm_head = mx.compile(model.logits) if self.compiled else model.logits
        self.graphs = self._open_graphs(graph_bytes) if self.compiled and graph_bytes != 0 else None
        self.waits = 0  # steps that had to wait for the device
        self._in_flight = False  # whether a step was launched since the last wait
        self._sampled: deque[Sampled] = deque(maxlen=MAX_AHEAD + 1)  # the newest, read or not

    def _open_graphs(self, max_bytes: int | None) -> CudaGraphRunner | None:
        """Where decode steps can be launched without MLX: on CUDA, if kernels read all caches."""
        gpu = self.model.kernels.gpu
        if gpu is None or gpu.library is None or not all(g.spec.pages or g.spec.recurrent for g in self.groups):
            return None
        try:
            device = Driver(gpu.library)
        except (OSError, RuntimeError) as error:
            log.warning(f"decode steps are launched kernel by kernel: CUDA's driver cannot be used ({error})")
            return None
        step, library = (self.sample_step, self.sample_fn), gpu.library
        return CudaGraphRunner(
            *step,
            self.model,
            library,
            device,
            max_bytes,
            compiled_logits=self.logits_fn,
            recurrent=self.recurrent_layers,
        )

    @property
    def recurrent_layers(self) -> frozenset[int]:
        return frozenset(i for i, g in self.group_of.items() if self.groups[g].spec.recurrent)

    @property
    def live(self) -> dict[int, tuple] | tuple[()]:
        """The decode tail's arrays."""
        return self.tail.live if self.tail else ()

    def launch(self, step: Step) -> InflightStep:
        """Launch a step. One with rows under a grammar is only sampled by `sample`."""
        inside = self._samples_inside(step)
        if any(s.samples and s.seq.grammar is not None for s in step.slices):
            return self._launch_unsampled(step, inside)
        if inside:
            seqs = [s.seq for s in step.slices]
            tokens, result, *logprobs = self.run(step, self.sample_fn)
            sampled = Sampled(tokens, result, tuple(seq.id for seq in seqs), {})
            if logprobs:
                sampled = replace(sampled, logprobs=logprobs[0], counts=logprob_counts(seqs))
            return self._submit(InflightStep(step.slices, None, step.prefill_tokens), sampled)
        hidden, finite = self._last_hidden(step)
        ends = [i for i, s in enumerate(step.slices) if s.samples]
        if not ends:
            mx.async_eval(self.live, finite)
            return InflightStep((), None, step.prefill_tokens, step.slices, finite)
        slices = tuple(step.slices[i] for i in ends)
        rows = hidden if len(ends) == hidden.shape[0] else hidden[mx.array(ends)]
        seqs = [s.seq for s in slices]
        # Graphs write all their tokens to one array: of those in flight it has the newest only.
        late = [self._read_pending(seq) if is_penalised(seq) else () for seq in seqs] if self.graphs else None
        with LogitsView(self.lm_head(rows), seqs) as view:
            sampled = sample(view, self.model.kernels, late)
        return self._submit(InflightStep(slices, None, step.prefill_tokens, step.slices, finite), sampled)

    def _launch_unsampled(self, step: Step, inside: bool) -> InflightStep:
        """The model's part of a step whose rows have a grammar."""
        slices = tuple(s for s in step.slices if s.samples)
        seqs = [s.seq for s in slices]
        finite = None
        if inside and self.graphs is not None:
            result = self.run(step, self.logits_fn)
            if isinstance(result, UnsampledStep):
                return InflightStep(slices, None, step.prefill_tokens, draw=partial(self._draw, result, seqs))
            logits = result[0][: len(seqs)]
        else:
            ends = [i for i, s in enumerate(step.slices) if s.samples]
            hidden, finite = self._last_hidden(step)
            logits = self.lm_head(hidden if len(ends) == hidden.shape[0] else hidden[mx.array(ends)])
        mx.async_eval(logits, self.live, () if finite is None else finite)

        def draw(masks: GrammarMasks) -> Sampled:
            with LogitsView(logits, seqs) as view:
                return sample(view, self.model.kernels, [()] * len(seqs), masks)

        return InflightStep(slices, None, step.prefill_tokens, step.slices, finite, draw)

    def sample(self, launched: InflightStep) -> InflightStep:
        """Sample a step whose rows have a grammar, now that all tokens before it are known. The model's part of it
        runs while those are read and the masks are made."""
        assert launched.draw is not None
        masks = GrammarMasks.fill([s.seq for s in launched.slices], self.model.config.vocab_size)
        return self._submit(launched, launched.draw(masks))

    def _draw(self, unsampled: UnsampledStep, seqs: list[Sequence], masks: GrammarMasks) -> Sampled:
        tokens, result, *logprobs = unsampled.sample(masks.of_batch(bucket(len(seqs))))
        sampled = Sampled(tokens, result, tuple(seq.id for seq in seqs), masks.errors)
        return replace(sampled, logprobs=logprobs[0], counts=logprob_counts(seqs)) if logprobs else sampled

    def _samples_inside(self, step: Step) -> bool:
        """Whether sampling is part of the decode step. Where plain MLX draws only argmax is: it parts drawn rows."""
        kernels = self.model.kernels
        plain = kernels.gpu is None and (kernels.cpu is None or self.model.dtype != mx.float32)
        inside = is_greedy_alone if plain else lambda seq: not has_callback(seq)
        return step.decode and all(s.samples and inside(s.seq) for s in step.slices)

    def _read_pending(self, seq: Sequence, but: int = 0) -> list[int]:
        """The tokens of a sequence that are still on the device, `but` for so many of the newest. Waits for them."""
        rows = [(s, s.requests.index(seq.id)) for s in self._sampled if seq.id in s.requests]
        return [sampled.host[i] for sampled, i in rows[len(rows) - len(seq.pending) : len(rows) - but]]

    def _submit(self, step: InflightStep, sampled: Sampled) -> InflightStep:
        for i, s in enumerate(step.slices):
            s.seq.pending.append((sampled.tokens, i))
        self._sampled.append(sampled)
        live = self.tail.live if self.tail else ()
        finite = () if step.finite is None else step.finite
        mx.async_eval(sampled.arrays, live, finite)  # one call: each ends a batch of launches
        return replace(step, sampled=sampled, draw=None)

    def _last_hidden(self, step: Step) -> tuple[mx.array, mx.array | None]:
        """The last hidden state of every row; and of a step with prompt tokens, which hidden states are finite."""
        if not step.decode:
            hidden, finite = self.run(step, None)
            return hidden, finite
        hidden = self.run(step, self.decode_fn)[0][: len(step.slices)]
        return hidden, all_finite(hidden) if step.prefill_tokens else None

    def hidden(self, step: Step, every: bool = False) -> mx.array:
        """The last hidden state of every row, or of `every` token."""
        if step.decode:
            return self.run(step, self.decode_fn)[0][: len(step.slices)]
        return self.run(step, None, every)[0]

    def run(self, step: Step, decode_fn: DecodeFn | None, every: bool = False) -> Any:
        """What `decode_fn` returns for every row; without it, what `_run_prefill` returns for a step of any kind."""
        rows = tuple(s.seq.id for s in step.slices)
        pending, draws = self.pools.pending, self._draws(step, decode_fn)
        if (t := self.tail) and (not step.decode or pending or t.must_flush or not t.continues(step) or t.lacks(draws)):
            self.flush(continues=step.decode and not pending and t.continues(step))
        if pending:
            self.synchronize()
            self.pools.apply_pending()
        tokens = input_tokens(step, bucket(len(rows)) if decode_fn else 0)
        if decode_fn:
            return self._run_decode(step, rows, tokens, decode_fn, draws)
        return self._run_prefill(step, tokens, every)

    def _draws(self, step: Step, decode_fn: DecodeFn | None) -> bool:
        """Whether the step itself draws tokens, so that its tail must know how."""
        if decode_fn is self.logits_fn:
            return True
        return decode_fn is self.sample_fn and not all(is_greedy_alone(s.seq) for s in step.slices)

    def forward(self, tokens, batch, index, pools, live):
        """The step itself, from arrays alone: the hidden states and, by layer, the views with what it wrote."""
        views = self.open_views(batch, index, pools, live)
        return self.model(tokens, [views[i] for i in self.kv_layer]), views

    def open_views(self, batch, index, pools, live):
        """What each layer reads and writes."""
        index = [dict(arrays) for arrays in index]  # layers share arrays there, for this step only
        return {i: self.groups[g].spec.view(batch, index[g], pools[i], live[i]) for i, g in self.group_of.items()}

    def decode_step(self, tokens, batch, index, pools, live):
        """One token per row, at the end of its tail. Returns no pools, for it may not write them."""
        batch = batch._replace(positions=batch.start + batch.used)
        hidden, views = self.forward(tokens, batch, index, pools, live)
        return (hidden,), {i: view.live for i, view in views.items()}

    def sample_step(self, tokens, batch, index, pools, live):
        """The same with sampling: the tokens, and what the host reads of them. Unless all rows are plain greedy,
        `index` has one more entry than there are groups: what the draw op is told."""
        (hidden,), after = self.decode_step(tokens, batch, index, pools, live)
        logits, kernels = self.model.logits(hidden), self.model.kernels
        if len(index) == len(self.groups):
            return greedy_tokens(logits, kernels), after
        recent = live.get(RECENT, (None,))[0]
        outputs, recent = run_draw_step(logits, tokens, index[-1], recent, kernels)
        return outputs, after if recent is None else after | {RECENT: (recent,)}

    def logits_step(self, tokens, batch, index, pools, live):
        """The same up to the logits."""
        (hidden,), live = self.decode_step(tokens, batch, index[: len(self.groups)], pools, live)
        return (self.model.logits(hidden),), live

    def _run_prefill(self, step, tokens, every):
        """Rows of any length, packed: the hidden states and which are finite, before all but the last of each row are
        left out."""
        pools = self.pools
        batch, index = prefill_batch(step, self.groups, [s.start for s in step.slices], 0, len(step.slices))
        batch = batch._replace(every=every)
        views = self.open_views(batch, index, pools.arrays, self._open_prefill(index))
        begins_early = not self._in_flight and self.model.kernels.cpu is None
        if begins_early or self.model.kernels.cpu is not None:
            self.synchronize()  # CPU kernels compute at once
        if begins_early:
            self._submit_while_building(views)
        pools.arrays = {}  # what is held twice when it is written is copied, all of it
        try:
            hidden = self.model(tokens, [views[i] for i in self.kv_layer])
        finally:
            pools.arrays = {i: view.pool for i, view in views.items()}
            for view in views.values():
                view.on_write = None  # they would keep each other, and the pools, alive
        finite = None if every or any(s.samples for s in step.slices) else views[max(views)].finite()
        finite = all_finite(hidden) if finite is None else finite
        del views  # they hold every layer's keys and values, gathered
        if not begins_early:
            self.synchronize()  # it writes the pools in place: nothing else may be reading them
        mx.async_eval(pools.arrays)
        self._in_flight = True
        if every or hidden.shape[0] == len(step.slices):
            return hidden, finite
        ends, n = [], 0
        for s in step.slices:
            n += s.stop - s.start
            ends.append(n - 1)
        return hidden[mx.array(ends)], finite

    def _submit_while_building(self, views: dict[int, LayerView]) -> None:
        """Have an idle device begin with the first layers of a prompt while later ones are built, which takes the host
        a third of a millisecond each. What 1, 2, 4, 8 ... layers write is submitted when the next one writes; what they
        have gathered would be kept until the step is built otherwise."""
        layers, shared = sorted(views), {i for n, i in enumerate(self.kv_layer) if i != n}

        def submit(count: int) -> None:
            mx.async_eval([views[i].pool for i in layers[:count]])
            for i in set(layers[:count]) - shared:
                views[i].release()

        count = 1
        while count < len(layers):
            views[layers[count]].on_write = partial(submit, count)
            count *= 2

    def _open_prefill(self, index: list[dict]) -> dict[int, tuple]:
        """What a prefill step reads of the pools before it writes them, by layer. It is computed by the time the step
        waits for the device: MLX copies a pool that still has a reader."""
        pools = self.pools.arrays
        live = {i: self.groups[g].spec.open_prefill(pools[i], index[g]) for i, g in self.group_of.items()}
        if self.graphs is not None and any(live.values()):
            self.graphs.wait()  # it writes the pools without MLX's knowledge
        mx.async_eval(live)
        return live

    def _run_decode(self, step, rows, tokens, decode_fn, draws):
        """One token a row, any number of steps in flight."""
        t = self.tail or DecodeTail(rows, [s.start for s in step.slices])
        width = bucket(len(rows))
        t.batch, t.index, host = decode_batch(step, self.groups, t.span, width, self.compiled, self.arrays)
        seqs = [s.seq for s in step.slices]
        masked = decode_fn is self.logits_fn
        if draws:
            if t.draws is None:
                # The newest token is the step's input: with one step in flight nothing is waited for.
                late = [self._read_pending(seq, but=1) if is_penalised(seq) else () for seq in seqs]
                vocab = self.model.config.vocab_size
                rows = [draw_row(seq, vocab, own, min(len(seq.pending), 1)) for seq, own in zip(seqs, late)]
                history, masks = any(map(is_penalised, seqs)), vocab if masked else 0
                t.draws = draw_batch(rows, width, history, max(logprob_counts(seqs)), masks)
            t.index.append(step_of_tail(t.draws, t.used))
            host.append(t.draws["host"])
        self.tail = t  # only now: a stale block raises above and must not leave half a tail
        self._in_flight = True
        pools = self.pools.arrays
        if not t.live:
            t.live = {
                i: self.groups[g].spec.open_live(pools[i], t.index[g], width, self.arrays)
                for i, g in self.group_of.items()
            }
            if t.draws is not None and t.draws["variant"][0]:
                t.live[RECENT] = (self.arrays.zeros((width, TAIL), mx.uint32),)
        inputs = tokens, t.batch, t.index, pools, t.live
        graphs = self.graphs if masked or decode_fn is self.sample_fn else None
        if graphs is None and self.graphs is not None:
            self.graphs.wait()  # MLX reads tail and pools itself
        with self.model.kernels.capturing(graphs is not None):
            outputs, t.live = decode_fn(*inputs) if graphs is None else graphs(t.used, host, *inputs)
        t.used, t.checkpoint = t.used + 1, step.checkpoint
        if graphs is not None and t.must_flush and all(g.spec.pages or g.spec.recurrent for g in self.groups):
            t.pieces = [self._tail_pieces(g, step, t) for g in range(len(self.groups))]
        return outputs

    def flush(self, continues: bool = False) -> None:
        """Write the decode tail to the pools; `continues`: the next step is the next one of this very batch."""
        t, self.tail = self.tail, None
        if t is None or t.batch is None:
            return
        if t.pieces and self.graphs is not None and self.graphs.flush(t.live, t.pieces):
            return None if continues else self.synchronize()
        self.synchronize()
        batch, pools = t.batch._replace(used=mx.array([t.used])), self.pools.arrays
        for i, g in self.group_of.items():
            pools[i] = self.groups[g].spec.flush(pools.pop(i), t.live[i], batch, t.index[g], t.is_block)
        mx.async_eval(pools)

    def _tail_pieces(self, g: int, step: Step, tail: DecodeTail) -> TailPieces:
        """Of the step's rows, while their blocks are theirs: those of a request that ends may be gone at the flush."""
        spec, layers, _ = self.groups[g]
        states = enumerate(s.seq.parts[g] for s in step.slices)
        pieces = [(row, *p) for row, state in states for p in spec.tail_pieces(state, tail.start[row], tail.used)]
        return TailPieces(layers, spec.size if spec.paged else 1, np.array(pieces, np.int64))

    def close(self) -> None:
        """Free the memory."""
        self.synchronize()
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self.pools.clear()
        self.tail = None

    def synchronize(self) -> None:
        if self.graphs is not None:
            self.graphs.wait()
        mx.synchronize()
        self._in_flight = False
        self.waits += 1


def all_finite(hidden: mx.array) -> mx.array:
    """hidden [N, width] -> [N]."""
    return mx.isfinite(hidden).all(axis=-1)
