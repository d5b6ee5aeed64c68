"""One step's logits as the rest of mlxrt and a user's callback may see them: for that step only, one row per sequence.

A view knows arrays and rows, not how a token is chosen (sampler.py) nor what a step is. The model runner opens and
closes it; every read after that raises StaleLogits, also through a row that a callback kept.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import mlx.core as mx

from ..config import check_number
from ..errors import BadRequest, MlxrtError, StaleLogits
from .request import read_list
from .sequence import Sequence


class LogitsView:
    """The logits of one step, [R, V]. Nothing is copied or converted before it is read."""

    def __init__(self, logits: mx.array, rows: list[Sequence]):
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise MlxrtError(f"logits of shape {logits.shape} do not give one row to each of {len(rows)} sequences")
        self.rows, self.vocab = rows, logits.shape[1]
        self._given: mx.array | None = logits  # as the model made them, in its dtype
        self._edited: mx.array | None = None  # float32, once anything changed them
        self._edits: dict[int, mx.array] = {}  # rows not yet put into _edited: many callbacks cost one copy
        self._memo: dict[tuple[str, int], mx.array] = {}

    @property
    def given(self) -> mx.array:
        """What the model computed, untouched and in its own dtype."""
        if self._given is None:
            ids = ", ".join(str(seq.id) for seq in self.rows)
            raise StaleLogits(
                f"the logits of requests {ids} were read after their step had ended; "
                "read them inside on_logits, and keep numbers rather than the row"
            )
        return self._given

    @property
    def latest(self) -> mx.array:
        """The same values as `logits`, in the model's own dtype until a row is edited."""
        given = self.given
        if self._edits:
            edits, self._edits = self._edits, {}
            self.replace(list(edits), mx.stack(list(edits.values())))
        return given if self._edited is None else self._edited

    @property
    def logits(self) -> mx.array:
        """float32 [R, V] with all edits so far."""
        latest = self.latest
        if ("all", 0) not in self._memo:
            self._memo["all", 0] = latest.astype(mx.float32)
        return self._memo["all", 0]

    def row(self, i: int) -> "LogitsRow":
        if not 0 <= i < len(self.rows):
            raise MlxrtError(f"row {i} of a view with {len(self.rows)} rows")
        return LogitsRow(self, i)

    def replace(self, indices: list[int], rows: mx.array) -> None:
        """Put float32 rows [len(indices), V] in place of those at `indices`."""
        latest = self.latest
        if indices == list(range(len(self.rows))):
            self._edited = rows
        else:
            # A new handle: assignment would otherwise change the array that a reader of `logits` holds.
            self._edited = copy.copy(latest.astype(mx.float32))
            self._edited[mx.array(indices)] = rows
        self._memo.clear()

    def replace_row(self, i: int, row: mx.array) -> None:
        self.given  # noqa: B018  an edit after the step would be lost in silence
        self._edits[i] = row
        self._memo = {key: array for key, array in self._memo.items() if key[1] != i or key[0] == "all"}

    def read_row(self, i: int) -> mx.array:
        given = self.given
        if i in self._edits:
            return self._edits[i]
        return self.memo("row", i, lambda: (given if self._edited is None else self._edited)[i].astype(mx.float32))

    def memo(self, name: str, i: int, make: Callable[[], mx.array]) -> mx.array:
        """What `make` gives, computed once until row i changes or the step ends."""
        if (name, i) not in self._memo:
            self._memo[name, i] = make()
        return self._memo[name, i]

    def close(self) -> None:
        self._given = self._edited = None
        self._edits.clear()
        self._memo.clear()

    def __enter__(self) -> "LogitsView":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class LogitsRow:
    """One sequence's row as its on_logits callback sees and edits it: after suppression, before temperature."""

    def __init__(self, view: LogitsView, i: int):
        self._view, self._i = view, i

    @property
    def _seq(self) -> Sequence:
        self._view.given  # noqa: B018  the tokens of a kept row would be those of a later step
        return self._view.rows[self._i]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return tuple(self._seq.tokens)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Of this request."""
        return self._seq.prompt

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """Of its answer, so far."""
        return tuple(self._seq.tokens[len(self._seq.prompt) :])

    @property
    def logits(self) -> mx.array:
        """float32 [V]."""
        return self._view.read_row(self._i)

    @property
    def logprobs(self) -> mx.array:
        """float32 [V], the logarithm of the softmax of `logits`."""
        row = self.logits
        return self._view.memo("logprobs", self._i, lambda: row - mx.logsumexp(row))

    def top(self, n: int) -> list[tuple[int, float]]:
        """The n most likely tokens and their log probabilities, best first. Waits for the device."""
        vocab = self._view.vocab
        n = check_number("n of top(n)", n, int, 1, vocab, f"a whole number in 1..{vocab}")
        ids = best(self.logprobs[None], n)[0]
        return rank_tokens(ids.tolist(), self.logprobs[ids].tolist())

    def edit(self, logits: mx.array) -> None:
        """Replace the row."""
        vocab = self._view.vocab
        if not isinstance(logits, mx.array) or not mx.issubdtype(logits.dtype, mx.floating):
            found = logits.dtype if isinstance(logits, mx.array) else type(logits).__name__
            raise BadRequest(f"edited logits must be an mx.array of floats, not {found}; see astype")
        if logits.shape != (vocab,):
            raise BadRequest(f"edited logits must have shape ({vocab},), one per token, not {logits.shape}")
        self._view.replace_row(self._i, logits.astype(mx.float32))

    def add(self, bias: Mapping[int, float] | mx.array) -> None:
        """Add a number to the logits of some tokens, or an array to all."""
        if isinstance(bias, mx.array):
            if bias.shape != (self._view.vocab,):
                raise BadRequest(f"a bias array must have shape ({self._view.vocab},), not {bias.shape}")
            return self.edit(self.logits + bias.astype(mx.float32))
        if not isinstance(bias, Mapping) or any(isinstance(v, bool) or not isinstance(v, Real) for v in bias.values()):
            raise BadRequest("a bias maps token ids to numbers")
        ids, values = self._ids(bias), [float(v) for v in bias.values()]
        if values:
            self.edit(self.logits.at[ids].add(mx.array(values, mx.float32)))

    def ban(self, tokens: Iterable[int]) -> None:
        """Make these tokens impossible."""
        self.edit(mx.where(self._marked(tokens), -mx.inf, self.logits))

    def allow(self, tokens: Iterable[int]) -> None:
        """Make all other tokens impossible."""
        self.edit(mx.where(self._marked(tokens), self.logits, -mx.inf))

    def _marked(self, tokens: Iterable[int]) -> mx.array:
        marked = mx.zeros((self._view.vocab,), mx.bool_)
        ids = self._ids(tokens)
        if ids.size:
            marked[ids] = True
        return marked

    def _ids(self, tokens: Iterable[int]) -> mx.array:
        last = self._view.vocab - 1
        ids = read_list("tokens", [*tokens] if isinstance(tokens, Mapping) else tokens)
        known = [check_number("token ids", t, int, 0, last, f"whole numbers in 0..{last}") for t in ids]
        return mx.array(known, mx.uint32)


def best(logits: mx.array, n: int) -> mx.array:
    """The ids [R, n] of each row's n largest logits, in no order: a partition, never a full sort."""
    return mx.argpartition(logits, -n, axis=-1)[:, -n:]


def rank_tokens(ids: Any, logprobs: Any) -> list[tuple[int, float]]:
    """Two lists as pairs, best first; equal ones by id, so that the order is the same on every device."""
    return sorted(zip(ids, logprobs), key=lambda pair: (-pair[1], pair[0]))
