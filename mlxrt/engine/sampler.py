"""The only path from logits to tokens.

In this order, each step for the rows that ask for it:
 1. repetition penalty (prompt and output), frequency and presence penalty (output only)
 2. logit bias, suppressed tokens, the mask of the request's grammar
 3. the request's on_logits callback
 4. greedy rows (temperature 0): the largest logit, the lowest id among equals. The others:
 5. temperature, top-k, top-p, min-p, one draw

All but the callback is the draw op (kernels/ops/draw.py). A row depends on its own logits, parameters, seed and
position alone. Log probabilities are the model's own: of its logits before step 1. Nothing here waits for the device,
knows a step, or ends a request: what went wrong in a row travels with the tokens.
"""

import secrets
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import BadLogits, BadRequest, GrammarFailed
from ..kernels import PLAIN, DrawPlan, DrawRow, Kernels, argmax, draw, pack_rows, top_logprobs
from .logits import LogitsRow, LogitsView, rank_tokens
from .request import Logprobs, SamplingParams, keep_error
from .sequence import Sequence

NEUTRAL = (1.0, 0.0, 0.0)  # penalties that change nothing


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """What SamplingParams alone cannot know: whether its token ids exist."""
    named = {"suppress": params.suppress, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    for name, ids in named.items():
        if outside := [t for t in ids if t >= vocab_size]:
            raise BadRequest(f"{name} names token {outside[0]}, the vocabulary is 0..{vocab_size - 1}")
    if len(set(params.suppress)) == vocab_size:
        raise BadRequest(f"suppress names all {vocab_size} tokens of the vocabulary; leave at least one")
    if params.logprobs > vocab_size:
        raise BadRequest(f"logprobs asks for {params.logprobs} tokens, the vocabulary has {vocab_size}")


def draw_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(64)


@dataclass(frozen=True)
class Sampled:
    """One token per row, on the device.

    `tokens` are always ids of the vocabulary, so that a step launched ahead can embed them: a row without a finite
    best logit (NaN, everything banned) gets token 0 and a mark. `result` has both for the host, read in one go.
    """

    tokens: mx.array  # uint32 [R]
    result: (
        Any  # uint32 [R, 2 + n], an array or a transfer in flight: the token, 1 where it must not be used, the n best
    )
    requests: tuple[int, ...]  # ids of the rows' sequences
    errors: dict[int, Exception]  # row -> what its on_logits raised
    logprobs: Any = None  # float32 [R, 1 + n], of the token and of the n best
    counts: tuple[int, ...] = ()  # how many log probabilities each row wants; none if no row does

    @property
    def arrays(self) -> list[mx.array]:
        """All that has to be computed before reading: for mx.async_eval."""
        return [a for a in (self.tokens, self.result, self.logprobs) if isinstance(a, mx.array)]

    @cached_property
    def host(self) -> list[int]:
        """The tokens. Waits."""
        return [token for token, *_ in self._host_result]

    @cached_property
    def _host_result(self) -> Any:
        return self.result.tolist()[: len(self.requests)]  # idle rows come after

    @cached_property
    def _host_logprobs(self) -> Any:
        return self.logprobs.tolist()

    def read(self, i: int, token: int) -> Logprobs:
        """Row i's (token, log probability): the chosen token, then the others of the top n, best first. Waits."""
        if not self.counts or not self.counts[i]:
            return ()
        n, ids, (chosen, *best) = self.counts[i], self._host_result[i][2:], self._host_logprobs[i]
        others = [pair for pair in rank_tokens(ids[:n], best[:n]) if pair[0] != token]
        return ((token, chosen), *others)

    def failures(self) -> dict[int, Exception]:
        """Row -> why its token must not be used. Waits."""
        found: dict[int, Exception] = {
            i: BadLogits(
                f"request {self.requests[i]}: no token can be chosen: its logits are NaN or infinite, or every token "
                "is banned; check suppress, logit_bias, penalties, on_logits and the weights"
            )
            for i, (_, bad, *_) in enumerate(self._host_result)
            if bad
        }
        found |= self.errors
        self.errors.clear()  # the runner keeps this object a while: an error holds the frames of whoever raises it
        return found


@dataclass(frozen=True)
class GrammarMasks:
    """Which tokens the rows with a grammar may get next: a bit for each of the vocabulary."""

    rows: list[int]
    bits: np.ndarray  # uint32 [rows, V / 32]
    errors: dict[int, Exception]  # row -> why its grammar cannot tell

    @classmethod
    def fill(cls, seqs: Rows[Sequence], vocab: int) -> "GrammarMasks":
        rows = [i for i, seq in enumerate(seqs) if seq.grammar is not None]
        bits = np.full((len(rows), -(-vocab // 32)), 2**32 - 1, np.uint32)
        errors: dict[int, Exception] = {}
        for g, i in enumerate(rows):
            if seqs[i].finish is None:
                try:
                    seqs[i].grammar.fill_mask(bits[g])
                except GrammarFailed as error:
                    errors[i] = error
        return cls(rows, bits, errors)

    def of(self, group: list[int]) -> mx.array:
        """Those of rows that all have one."""
        return mx.array(self.bits[[self.rows.index(i) for i in group]])

    def of_batch(self, width: int) -> np.ndarray:
        """Those of all rows: the others may get any token."""
        bits = np.full((width, self.bits.shape[1]), 2**32 - 1, np.uint32)
        bits[self.rows] = self.bits
        return bits


NO_MASKS = GrammarMasks([], np.zeros((0, 0), np.uint32), {})


def sample(
    view: LogitsView, kernels: Kernels = PLAIN, late: Rows[Rows[int]] | None = None, masks: GrammarMasks = NO_MASKS
) -> Sampled:
    """One token per row of the view. `late`: what each row got and its sequence does not know yet, if it was read."""
    seqs, ids, counts = view.rows, tuple(seq.id for seq in view.rows), logprob_counts(view.rows)
    if not seqs:  # a step in which no sequence reached its end
        return Sampled(mx.zeros((0,), mx.uint32), mx.zeros((0, 2), mx.uint32), ids, {})
    rows = [
        draw_row(seq, view.vocab, (), len(seq.pending)) if late is None else draw_row(seq, view.vocab, late[i], 0)
        for i, seq in enumerate(seqs)
    ]
    groups: dict[tuple[bool, bool] | None, list[int]] = {}  # rows that need the same work
    for i, seq in enumerate(seqs):
        masked = i in masks.rows
        plain = is_greedy(seq) and not has_callback(seq) and not masked
        sorts = DrawPlan.of(rows[i : i + 1], view.vocab).sorts
        groups.setdefault(None if plain else (sorts, masked), []).append(i)
    done = []
    for kind, group in groups.items():
        x = take(view.given, group)
        if kind is None:
            done.append(greedy_tokens(x, kernels)[1])
        else:
            own, these = [rows[i] for i in group], [seqs[i] for i in group]
            mask = masks.of(group) if kind[1] else None
            status, adjusted = run_draw(x, own, these, kernels, late is None, mask)
            if mask is not None or any(changes_logits(seq) for seq in these):
                view.replace(group, adjusted)
            done.append(status)
    status = restore_order(done, list(groups.values()))
    errors = run_logits_callbacks(view)
    if called := [i for i, seq in enumerate(seqs) if has_callback(seq)]:
        edited = [replace(rows[i], **NO_CHANGE) for i in called]
        again, _ = run_draw(take(view.logits, called), edited, [seqs[i] for i in called], kernels, False)
        others = [i for i in range(len(seqs)) if i not in called]
        status = restore_order([again, take(status, others)], [called, others]) if others else again
    return Sampled(status[:, 0], *with_logprobs(view.given, status, ids, masks.errors | errors, counts, kernels))


def take(x: mx.array, indices: list[int]) -> mx.array:
    return x if indices == list(range(x.shape[0])) else x[mx.array(indices)]


def restore_order(parts: list[mx.array], groups: list[list[int]]) -> mx.array:
    """The parts of groups of rows as one array, in the rows' order."""
    if len(parts) == 1:
        return parts[0]
    order = [i for group in groups for i in group]
    return mx.concatenate(parts)[mx.array(sorted(range(len(order)), key=order.__getitem__))]


def with_logprobs(x, status, ids, errors, counts, kernels) -> tuple:
    """The fields of `Sampled` after `tokens`."""
    if not any(counts):
        return status, ids, errors
    result, logprobs = kernels.run(top_logprobs, x=x, status=status, n=max(counts))
    return result, ids, errors, logprobs, counts


def logprob_counts(seqs: Rows[Sequence]) -> tuple[int, ...]:
    return tuple(seq.params.logprobs for seq in seqs)


# What the draw op is told

NO_CHANGE: dict[str, Any] = {"prompt": (), "output": (), "recent": 0, "bias": {}}


def draw_row(seq: Sequence, vocab: int, late: Rows[int], recent: int) -> DrawRow:
    """`late`: tokens that were read and that the sequence does not have yet; `recent` more are still on the device."""
    p = seq.params
    bias = dict(p.logit_bias) | dict.fromkeys(p.suppress, float("-inf"))
    given = DrawRow(
        p.temperature,
        p.top_k if p.top_k < vocab else 0,
        p.top_p,
        p.min_p,
        seq.seed,
        len(seq) - len(seq.prompt),
        *penalties(p),
        bias=bias,
    )
    if not is_penalised(seq):
        return given
    own = (*seq.tokens[len(seq.prompt) :], *late)
    return replace(given, prompt=seq.prompt if p.repetition_penalty != 1 else (), output=own, recent=recent)


def run_draw(
    x, rows: list[DrawRow], seqs: Rows[Sequence], kernels: Kernels, pending: bool, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Status [R, 2] and adjusted logits; `pending`: the sequences' newest tokens are still on the device."""
    arguments = {
        "x": x,
        "rows": pack_rows(rows),
        "offset": mx.zeros((1,), mx.uint32),
        "plan": DrawPlan.of(rows, x.shape[1]),
    }
    if pending and any(row.recent for row in rows):
        arguments |= gather_pending(rows, seqs)
    if mask is not None:
        arguments["mask"] = mask
    _, status, adjusted, *_ = kernels.run(draw, **arguments)
    return status, adjusted


def run_draw_step(x, tokens, draws: dict, recent, kernels: Kernels) -> tuple[tuple[mx.array, ...], mx.array | None]:
    """A decode step's tokens and what the host reads of them, and `recent` with `tokens`: all by arrays."""
    history, top, _ = draws["variant"]
    arguments = {"x": x, "rows": draws["table"], "offset": draws["where"]}
    if history:
        arguments |= {"tokens": tokens, "recent": recent}
    if "mask" in draws:
        arguments["mask"] = draws["mask"]
    chosen, status, _, *after = kernels.run(draw, **arguments)
    outputs = (chosen, status) if not top else (chosen, *kernels.run(top_logprobs, x=x, status=status, n=top))
    return outputs, after[0] if after else None


def gather_pending(rows: list[DrawRow], seqs: Rows[Sequence]) -> dict[str, mx.array]:
    """`tokens` and `recent` of the draw op: the newest token of each sequence, and those before it."""
    zero, width = mx.zeros((1,), mx.uint32), max(row.recent for row in rows)
    late = [
        [array[j : j + 1].astype(mx.uint32) for array, j in seq.pending] if row.recent else []
        for row, seq in zip(rows, seqs)
    ]
    recent = mx.concatenate([part for own in late for part in (own + [zero] * (width - len(own)))])
    return {
        "tokens": mx.concatenate([own[-1] if own else zero for own in late]),
        "recent": recent.reshape(len(rows), width),
    }


def penalties(p: SamplingParams) -> tuple[float, float, float]:
    return p.repetition_penalty, p.presence_penalty, p.frequency_penalty


def is_penalised(seq: Sequence) -> bool:
    return penalties(seq.params) != NEUTRAL


def changes_logits(seq: Sequence) -> bool:
    """Whether anything is done to its logits before temperature."""
    return is_penalised(seq) or bool(seq.params.logit_bias or seq.params.suppress)


def is_greedy(seq: Sequence) -> bool:
    """Whether plain argmax of the model's own logits is its token."""
    return seq.params.temperature <= 0 and not changes_logits(seq)


def has_callback(seq: Sequence) -> bool:
    return seq.request.on_logits is not None


def is_greedy_alone(seq: Sequence) -> bool:
    """Whether argmax is all it asks for."""
    return is_greedy(seq) and not has_callback(seq) and not seq.params.logprobs


def greedy_tokens(logits: mx.array, kernels: Kernels = PLAIN) -> tuple[mx.array, mx.array]:
    """Tokens and status where every row is greedy."""
    return kernels.run(argmax, x=logits)


def run_logits_callbacks(view: LogitsView) -> dict[int, Exception]:
    """Let the callbacks see and edit their rows. What one raises ends its request, so it is kept, not raised."""
    errors: dict[int, Exception] = {}
    for i, seq in enumerate(view.rows):
        if seq.request.on_logits is not None and (error := run_callback(seq.request.on_logits, view.row(i))):
            errors[i] = error
    return errors


def run_callback(callback: Callable[[LogitsRow], None], row: LogitsRow) -> Exception | None:
    """What the callback raised."""
    try:
        answer: object = callback(row)  # type: ignore[func-returns-value]
        if answer is not None:
            raise BadRequest(f"on_logits returned {type(answer).__name__}, not None; change logits with row.edit()")
    except BaseException as raised:  # a request boundary: a user's code may raise anything
        return keep_error(raised)
    return None
