"""The only path from logits to tokens.

In this order, each step for the rows that ask for it:
 1. repetition penalty (prompt and output), frequency and presence penalty (output only)
 2. logit bias, suppressed tokens
 3. the request's on_logits callback
 4. greedy rows (temperature 0): the largest logit, the lowest id among equals. The others:
 5. temperature, top-k, top-p, min-p, one draw

A row depends on its own logits, parameters, seed and position alone. Log probabilities are the model's own: of its
logits before step 1. Nothing here waits for the device, knows a step, or ends a request: what went wrong in a row
travels with the tokens.
"""

import copy
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..errors import BadLogits, BadRequest
from ..kernels import PLAIN, Kernels, argmax
from .logits import LogitsView, best, rank_tokens
from .request import Logprobs, SamplingParams
from .sampling_ops import filter_logits, pick, uniforms
from .sequence import Sequence

NEUTRAL = (1.0, 0.0, 0.0)  # penalties that change nothing
COLDEST = 1e-20  # below, x / T overflows float32; here already, every gap between logits is a certainty


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
class TopLogprobs:
    """Log probabilities of the rows that want n of them, on the device until `host` is read."""

    chosen: mx.array  # [G]
    ids: mx.array  # [G, n]
    logprobs: mx.array  # [G, n]

    @cached_property
    def host(self) -> tuple[Any, Any, Any]:
        """The three as lists, read once for all rows."""
        return self.chosen.tolist(), self.ids.tolist(), self.logprobs.tolist()


@dataclass(frozen=True)
class Sampled:
    """One token per row, on the device.

    `tokens` are always ids of the vocabulary, so that a step launched ahead can embed them: a row without a finite
    best logit (NaN, everything banned) gets token 0 and a mark. `result` has both for the host, read in one go.
    """

    tokens: mx.array  # uint32 [R]
    result: Any  # uint32 [R, 2], an array or a transfer in flight: the token, and 1 where it must not be used
    requests: tuple[int, ...]  # ids of the rows' sequences
    errors: dict[int, Exception]  # row -> what its on_logits raised
    tops: dict[int, tuple[TopLogprobs, int]]  # row -> where its log probabilities are

    @property
    def arrays(self) -> list[mx.array]:
        """All that has to be computed before reading: for mx.async_eval."""
        tops = {id(top): top for top, _ in self.tops.values()}.values()
        result = [self.result] if isinstance(self.result, mx.array) else []
        return [self.tokens, *result, *(a for top in tops for a in (top.chosen, top.ids, top.logprobs))]

    @cached_property
    def host(self) -> list[int]:
        """The tokens. Waits."""
        return [token for token, _ in self._host_result]

    @cached_property
    def _host_result(self) -> Any:
        return self.result.tolist()[: len(self.requests)]  # idle rows come after

    def read(self, i: int, token: int) -> Logprobs:
        """Row i's (token, log probability): the chosen token, then the others of the top n, best first. Waits."""
        if i not in self.tops:
            return ()
        top, g = self.tops[i]
        chosen, ids, logprobs = top.host
        others = [pair for pair in rank_tokens(ids[g], logprobs[g]) if pair[0] != token]
        return ((token, chosen[g]), *others)

    def failures(self) -> dict[int, Exception]:
        """Row -> why its token must not be used. Waits."""
        found: dict[int, Exception] = {
            i: BadLogits(
                f"request {self.requests[i]}: no token can be chosen: its logits are NaN or infinite, or every token "
                "is banned; check suppress, logit_bias, penalties, on_logits and the weights"
            )
            for i, (_, bad) in enumerate(self._host_result)
            if bad
        }
        return found | self.errors


def sample(view: LogitsView, kernels: Kernels = PLAIN) -> Sampled:
    """One token per row of the view."""
    apply_penalties(view)
    apply_bias(view)
    errors = run_logits_callbacks(view)
    tokens, result = choose(view, kernels)
    return Sampled(tokens, result, tuple(seq.id for seq in view.rows), errors, rank(view, tokens))


def where(view: LogitsView, wanted: Callable[[SamplingParams], bool]) -> list[int]:
    return [i for i, seq in enumerate(view.rows) if wanted(seq.params)]


def take(x: mx.array, indices: list[int]) -> mx.array:
    return x if len(indices) == x.shape[0] else x[mx.array(indices)]


def column(seqs: list[Sequence], value: Callable[[SamplingParams], float]) -> mx.array:
    return mx.array([[value(seq.params)] for seq in seqs], mx.float32)  # [G, 1]


# Penalties, bias, suppression, callbacks


def penalties(p: SamplingParams) -> tuple[float, float, float]:
    return p.repetition_penalty, p.presence_penalty, p.frequency_penalty


def apply_penalties(view: LogitsView) -> None:
    """Touches only the ids that were named; each new logit comes from the old one, so naming one twice is harmless."""
    rows = where(view, lambda p: penalties(p) != NEUTRAL)
    seqs = [view.rows[i] for i in rows]
    output = [s.tokens[len(s.prompt) :] for s in seqs]
    named = [set(s.tokens if s.params.repetition_penalty != 1.0 else own) for s, own in zip(seqs, output)]
    late = [s.pending for s in seqs]
    if not any(named) and not any(late):
        return
    x = copy.copy(take(view.logits, rows))  # a new handle: the view's own array must not change under its readers
    at, ids = locate(named, late, view.vocab)
    hit = x[at, ids]
    p = column(seqs, lambda p: p.repetition_penalty)[at, 0]
    hit = mx.where(hit < 0, hit * p, hit / p)
    if any(output) or any(late):
        n = mx.zeros(x.shape, mx.int32).at[locate(output, late, view.vocab)].add(1)[at, ids]
        hit = hit - column(seqs, lambda p: p.frequency_penalty)[at, 0] * n
        hit = hit - column(seqs, lambda p: p.presence_penalty)[at, 0] * (n > 0)
    x[at, ids] = hit
    view.replace(rows, x)


def locate(known: list, pending: list, vocab: int) -> tuple[mx.array, mx.array]:
    """Row and id of every token known to each row, and of its tokens still on the device."""
    rows: list[int] = []
    ids: list[int] = []
    for g, tokens in enumerate(known):
        # An id without a logit (a placeholder of a multimodal prompt) can be in a prompt, never be chosen.
        real = [t for t in tokens if t < vocab] if max(tokens, default=0) >= vocab else tokens
        rows += [g] * len(real)
        ids += real
    late = [(g, tokens[j : j + 1].astype(mx.uint32)) for g, steps in enumerate(pending) for tokens, j in steps]
    at = mx.array(rows + [g for g, _ in late], mx.uint32)
    return at, mx.concatenate([mx.array(ids, mx.uint32), *(token for _, token in late)])


def apply_bias(view: LogitsView) -> None:
    """Bias and suppression: both are sums, since anything plus -inf is -inf."""
    rows = where(view, lambda p: bool(p.logit_bias or p.suppress))
    if not rows:
        return
    at, ids, values = [], [], []
    for g, i in enumerate(rows):
        p = view.rows[i].params
        banned = dict.fromkeys(p.suppress, float("-inf"))
        for token, value in (dict(p.logit_bias) | banned).items():
            at.append(g)
            ids.append(token)
            values.append(value)
    x = take(view.logits, rows)
    view.replace(rows, x.at[mx.array(at), mx.array(ids)].add(mx.array(values, mx.float32)))


def run_logits_callbacks(view: LogitsView) -> dict[int, Exception]:
    """Let the callbacks see and edit their rows. What one raises ends its request, so it is kept, not raised."""
    errors: dict[int, Exception] = {}
    for i, seq in enumerate(view.rows):
        if seq.request.on_logits is None:
            continue
        try:
            answer = seq.request.on_logits(view.row(i))
            if answer is not None:
                raise BadRequest(f"on_logits returned {type(answer).__name__}, not None; change logits with row.edit()")
        except Exception as error:  # a request boundary: a user's code may raise anything
            errors[i] = error
    return errors


# Choosing


def choose(view: LogitsView, kernels: Kernels = PLAIN) -> tuple[mx.array, mx.array]:
    """`tokens` and `result`. Rows that need the same work are done together."""
    groups: dict[tuple[int, bool] | None, list[int]] = {}
    for i, seq in enumerate(view.rows):
        p = seq.params
        hot = (p.top_k if p.top_k < view.vocab else 0, p.top_p < 1)
        groups.setdefault(hot if p.temperature > 0 else None, []).append(i)
    if not groups:  # a step in which no sequence reached its end
        return mx.zeros((0,), mx.uint32), mx.zeros((0, 2), mx.uint32)
    if groups.keys() == {None}:
        return greedy_tokens(view.latest, kernels)
    done = []
    for kind, rows in groups.items():
        seqs = [view.rows[i] for i in rows]
        if kind is None:
            done.append(argmax_rows(take(view.latest, rows)))
        else:
            done.append(draw(take(view.logits, rows), seqs, *kind))
    tokens, peak = (mx.concatenate(list(parts)) if len(parts) > 1 else parts[0] for parts in zip(*done))
    if len(groups) > 1:
        order = [i for rows in groups.values() for i in rows]
        back = mx.array(sorted(range(len(order)), key=order.__getitem__))
        tokens, peak = tokens[back], peak[back]
    bad = ~mx.isfinite(peak)
    tokens = mx.where(bad, mx.array(0, mx.uint32), tokens.astype(mx.uint32))
    return tokens, mx.stack([tokens, bad.astype(mx.uint32)], axis=1)


def greedy_tokens(logits: mx.array, kernels: Kernels = PLAIN) -> tuple[mx.array, mx.array]:
    """The same where every row is greedy."""
    return kernels.run(argmax, x=logits)


def is_plain_greedy(seq: Sequence) -> bool:
    """True if plain argmax suffices, so that it can run inside the compiled step."""
    p = seq.params
    changed = p.logit_bias or p.suppress or p.logprobs or seq.request.on_logits is not None
    return p.temperature <= 0 and not changed and penalties(p) == NEUTRAL


def argmax_rows(x: mx.array) -> tuple[mx.array, mx.array]:
    tokens = mx.argmax(x, axis=-1)
    return tokens, mx.take_along_axis(x, tokens[:, None], axis=-1)[:, 0].astype(mx.float32)


def draw(x: mx.array, seqs: list[Sequence], top_k: int, nucleus: bool) -> tuple[mx.array, mx.array]:
    """One token per row of x [G, V], and the row's largest scaled logit."""
    x = x / column(seqs, lambda p: max(p.temperature, COLDEST))
    u = mx.array([uniforms(seq.seed, len(seq) - len(seq.prompt)) for seq in seqs], mx.float32)  # [G, 3]
    min_p = column(seqs, lambda p: p.min_p)
    if not top_k and not nucleus:
        peak = mx.max(x, axis=-1)
        weight = mx.exp(x - peak[:, None])
        return pick(mx.where(weight < min_p, 0.0, weight), u), peak
    rest = column(seqs, lambda p: 1 - p.top_p) if nucleus else None
    kept = filter_logits(x, top_k, rest, min_p)
    return kept.token(x, pick(kept.mass, u), u[:, 2:]), kept.values[:, -1]


# Log probabilities


def rank(view: LogitsView, tokens: mx.array) -> dict[int, tuple[TopLogprobs, int]]:
    """The chosen token's log probability and the top n, for rows that ask: no full softmax, no sort."""
    groups: dict[int, list[int]] = {}
    for i, seq in enumerate(view.rows):
        if seq.params.logprobs:
            groups.setdefault(seq.params.logprobs, []).append(i)
    tops = {}
    for n, rows in groups.items():
        x = take(view.given, rows).astype(mx.float32)
        total = mx.logsumexp(x, axis=-1, keepdims=True)
        ids = best(x, n)
        chosen = mx.take_along_axis(x, take(tokens, rows)[:, None], axis=-1) - total
        top = TopLogprobs(chosen[:, 0], ids, mx.take_along_axis(x, ids, axis=-1) - total)
        tops.update({i: (top, g) for g, i in enumerate(rows)})
    return tops
