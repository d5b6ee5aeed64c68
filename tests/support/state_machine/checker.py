"""Compares what the engine said with a dense forward over the same tokens, which has no memory at all.

One forward over prompt and answer checkers every token of it: as long as all before it agree, the row at its place is
what a fresh one-shot run would have chosen from.
"""

from collections import Counter, deque
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from mlxrt.engine.logits import LogitsView
from mlxrt.engine.request import Request, SamplingParams
from mlxrt.engine.sampler import sample
from mlxrt.engine.sequence import Sequence
from mlxrt.kernels import backend
from tests.support.oracle import logits

from . import kinds

NEVER = np.float32(-1e30)  # the logit of a token that is not allowed
TIE = 1e-5  # a difference is a tie only where the oracle itself is this undecided
NEAR = 5e-4  # how far logits may be off by the order of their sums
NEAR_QUANTIZED = 0.25  # the same where a number on the edge between two codes may fall to either side
GPU_TIE = 1e-4  # on a GPU a sum's order depends on the number of rows, and codes on their edges fall to either side
TIE_HALF = NEAR_HALF = 2e-2  # in float16, where rounding is that coarse
TIE_HALF_QUANTIZED = 0.1  # in float16 rounding alone moves numbers from one code to the next


class Difference(AssertionError):
    """The engine and the oracle disagree."""


class Checker:
    """The oracle for one kind. Remembers the last texts: many programs begin alike."""

    def __init__(self, kind: str, tally: Counter):
        self.kind, self.tally = kind, tally
        self.ties: list[str] = []
        self.half = half = kinds.dtype_of(kind) == mx.float16
        quantised = kinds.is_quantised(kind)
        on_gpu = backend() != "cpu"
        self.tie = (NEAR_QUANTIZED if quantised else GPU_TIE) if on_gpu else TIE
        if half:
            self.tie = max(self.tie, TIE_HALF_QUANTIZED if quantised else TIE_HALF)
        self.near = NEAR_QUANTIZED if quantised else NEAR_HALF if half else NEAR
        self.draws = 128 if half else 16  # of the oracle's own token, moved by that much
        self.ties_name = "ties in float16" if half else "ties"
        self.completed: dict[int, bool] = {}  # requests whose last token ended their form
        self._known: deque[tuple[tuple[int, ...], np.ndarray]] = deque(maxlen=100)

    def rows(self, tokens: tuple[int, ...]) -> np.ndarray:
        """The oracle's logits after each token, [n, vocab]."""
        for known, rows in self._known:
            if known[: len(tokens)] == tokens:
                return rows[: len(tokens)]
        rows = np.array(logits(kinds.model(self.kind), tokens).astype(mx.float32))
        if np.isfinite(rows).all():  # a dense forward lets a token that overflows spoil the rows before it
            self._known.appendleft((tokens, rows))
        return rows

    def check_logits(self, tokens: tuple[int, ...], got: mx.array, what: str) -> None:
        """`got` are the logits after the last tokens."""
        want = self.rows(tokens)[-got.shape[0] :]
        off = np.abs(np.array(got) - want).max(axis=-1)
        self.tally["logit rows compared"] += len(off)
        worst = int(off.argmax())
        if not off[worst] <= self.near:
            at = len(tokens) - len(off) + worst
            raise Difference(f"{what}: logits after token {at} of {list(tokens)} are off by {off[worst]:.6f}")

    def check(self, seq: Sequence, what: str) -> None:
        """Every token a sequence has been given."""
        prompt, said = seq.prompt, tuple(seq.tokens[len(seq.prompt) :])
        if not said:
            return
        rows = self.rows((*prompt, *said[:-1]))[len(prompt) - 1 :]
        self.tally["tokens compared"] += len(said)
        self.completed[seq.id] = False
        if seq.request.response_format is not None:
            rows = self._hold(seq, said, rows, what)
        want = self._wanted(seq, said, rows)
        for i, (token, right) in enumerate(zip(said, want)):
            if token != right and not self._is_tie(seq, i, token, right, rows[i]):
                gap = rows[i][right] - rows[i][token]
                raise Difference(
                    f"{what}: token {i} after {list(prompt + said[:i])} is {token}, the oracle says {right} "
                    f"(logits {gap:+.6f} apart), params {seq.params}"
                )
        if seq.stops & set(said[:-1]):
            raise Difference(f"{what}: {list(said)} goes on after a stop token {set(seq.stops)}")

    def _hold(self, seq: Sequence, said: tuple[int, ...], rows: np.ndarray, what: str) -> np.ndarray:
        """The rows without what the answer's form does not allow, by a matcher of our own."""
        matcher, rows = kinds.grammars().matcher(seq.request.response_format), rows.copy()
        bits = np.empty(-(-kinds.VOCAB // 32), np.uint32)
        for i, token in enumerate(said):
            matcher.fill_mask(bits)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: kinds.VOCAB].astype(bool)
            rows[i][~allowed] = NEVER
            if token in seq.stops:
                break
            if not allowed[token]:
                raise Difference(f"{what}: token {i} of {list(said)} is not of its form")
            self.completed[seq.id] = matcher.advance(token)
            if self.completed[seq.id] and i < len(said) - 1:
                raise Difference(f"{what}: {list(said)} goes on after its form is complete at token {i}")
        self.tally["tokens held to a form"] += len(said)
        self.tally["answers held to a form that were preempted"] += seq.preempted > 0
        self.tally["forms completed"] += self.completed.get(seq.id, False)
        return rows

    def _wanted(self, seq: Sequence, said: tuple[int, ...], rows: np.ndarray) -> list[int]:
        if takes_the_largest(seq):
            return rows.argmax(axis=-1).tolist()
        self.tally["tokens drawn or penalised"] += len(said)
        return [draw_alone(seq, said[:i], row) for i, row in enumerate(rows)]

    def _is_tie(self, seq: Sequence, i: int, token: int, right: int, row: np.ndarray) -> bool:
        """Undecided: moving the oracle's own logits by less than `tie` gives the engine's token."""
        if takes_the_largest(seq):
            undecided = abs(float(row[right] - row[token])) < self.tie
        else:
            said = tuple(seq.tokens[len(seq.prompt) : len(seq.prompt) + i])
            undecided = any(draw_alone(seq, said, moved) == token for moved in self._moved_rows(row))
        if undecided:
            self.tally[self.ties_name] += 1
            self.ties.append(f"tie in {self.kind}: {token} or {right} after {list(seq.prompt)} + {i} tokens")
        return undecided

    def _moved_rows(self, row: np.ndarray) -> Iterator[np.ndarray]:
        """The row with each logit moved by up to `tie`: at random; all of one side of an id against the other side,
        which moves the borders between tokens the furthest; and rounded.

        Rounded, two may be equal, and top-k keeps all that equal the k-th. Float16 logits are rounded each time.
        """
        noise, ids = np.random.default_rng(0), np.arange(len(row))
        for i in range(self.draws):
            most = self.tie / (1, 4, 16)[i % 3] if self.half else self.tie
            moved = row + noise.uniform(-most, most, row.shape).astype(np.float32)
            yield moved.astype(np.float16).astype(np.float32) if self.half else moved
        for step in (self.tie, self.tie / 8, self.tie / 64):
            for part in (0.0, 0.5):  # two that are close may lie on both sides of a border, but not of both
                yield ((np.round(row.astype(np.float64) / step + part) - part) * step).astype(np.float32)
        for middle in ids[:: 1 if self.tie > TIE else 16]:
            for sign in (1, -1):
                yield row + np.where(ids < middle, sign * self.tie, -sign * self.tie).astype(np.float32)

    def check_logprobs(self, seq: Sequence, entries: list, what: str) -> None:
        """The log probabilities that came with the tokens: they show a wrong cache long before a token flips."""
        prompt, said = seq.prompt, tuple(seq.tokens[len(seq.prompt) :])
        rows = self.rows((*prompt, *said[:-1]))[len(prompt) - 1 :].astype(np.float64)
        for i, (row, entry) in enumerate(zip(rows, entries)):
            total = np.log(np.exp(row - row.max()).sum()) + row.max()
            for token, p in entry:
                if not abs(row[token] - total - p) <= 2 * self.near:
                    raise Difference(
                        f"{what}: log probability {i} of token {token} after {list(prompt + said[:i])} is {p}, "
                        f"the oracle says {row[token] - total}"
                    )
            self.tally["log probabilities compared"] += len(entry)


def draw_alone(seq: Sequence, before: tuple[int, ...], row: np.ndarray) -> int:
    """The sampler, alone in its batch and on the CPU, on the oracle's row."""
    alone = Sequence(0, seq.request, seq.prompt, seq.stops, seq.seed)
    alone.tokens += before
    with mx.stream(mx.cpu), LogitsView(mx.array(row[None]), [alone]) as view:
        return int(np.array(sample(view).tokens)[0])


def takes_the_largest(seq: Sequence) -> bool:
    """Whether the model's own logits decide, with nothing added to them."""
    p = seq.params
    return p.temperature == 0 and p.repetition_penalty == 1 and not p.presence_penalty and not p.frequency_penalty


MOODS: tuple[dict, ...] = (
    {},
    {"logprobs": 3},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "logprobs": 2},
    {"stop_token_ids": tuple(range(0, kinds.VOCAB, 9)), "logprobs": 1},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logprobs": 1},
)


# Half of the requests have none.
FORMS: tuple[dict | None, ...] = (
    None,
    {"type": "regex", "pattern": "[0-9]{2,5}(-[a-f]+)?"},
    None,
    {"type": "choice", "choices": ["yes", "yesterday", "no (really)"]},
    None,
    {
        "type": "json_schema",
        "schema": {"type": "object", "properties": {"a": {"enum": [1, 22, None]}}, "required": ["a"]},
    },
    None,
    {"type": "grammar", "grammar": 'start: "(" /[a-c]/ start? ")"'},
)
STOPS = ("7", "c)", "yes")  # of one request in four that has a form


def asked(prompt: tuple[int, ...], n: int, mood: int, seed: int) -> Request:
    form, options = choose_options(mood, seed)
    return Request(tokens=prompt, response_format=form, params=SamplingParams(max_tokens=n, seed=seed, **options))


def choose_options(mood: int, seed: int) -> tuple[dict | None, dict]:
    """A form, or none, and options of the sampling."""
    form, options = FORMS[mood // len(MOODS) % len(FORMS)], dict(MOODS[mood % len(MOODS)])
    if form is not None and seed % 4 == 0:
        options["stop"] = STOPS
    return form, options
