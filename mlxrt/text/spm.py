"""SentencePiece's BPE as GGUF files carry it: no merges, only a score per token. The best scored join goes first.

Equal scores join from the left. A character no token covers becomes its bytes. Knows nothing of special tokens.
"""

import heapq
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

SPACE = "\u2581"


class ScoredMerges:
    """Text (spaces already written as ▁) to ids."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int]):
        self.ids, self.scores, self.byte_ids = ids, scores, byte_ids
        # A join needs a token that holds both neighbours. Where no token has this character before a space, the text
        # can be cut: the parts are small, repeat, and are remembered.
        inside = (t for t in ids if SPACE in t[1:])
        before = {c for t in inside for c, d in pairwise(t) if d == SPACE and c != SPACE}
        glued = "".join(map(re.escape, sorted(before)))
        self.cut = re.compile(rf"(?<=[^{SPACE}{glued}])(?={SPACE})")
        self.word = lru_cache(maxsize=1 << 15)(self._merge)

    def encode(self, text: str) -> list[int]:
        return [i for word in self.cut.split(text) for i in self.word(word)] if text else []

    def _merge(self, word: str) -> tuple[int, ...]:
        """Join neighbours, best score first, until no join is a token."""
        parts: list[str] = list(word)
        left, right = list(range(-1, len(parts) - 1)), [*range(1, len(parts)), -1]
        joins: list[tuple[float, int, int, str]] = []

        def offer(a: int, b: int) -> None:
            if a >= 0 and b >= 0 and (token := self.ids.get(parts[a] + parts[b])) is not None:
                heapq.heappush(joins, (-self.scores[token], a, b, parts[a] + parts[b]))

        for b in range(1, len(parts)):
            offer(b - 1, b)
        while joins:
            _, a, b, joined = heapq.heappop(joins)
            if not parts[a] or not parts[b] or len(parts[a]) + len(parts[b]) != len(joined):
                continue
            parts[a], parts[b] = joined, ""
            right[a] = right[b]
            if right[b] >= 0:
                left[right[b]] = a
            offer(left[a], a)
            offer(a, right[a])
        return tuple(i for part in parts if part for i in self._ids(part))

    def _ids(self, part: str) -> Sequence[int]:
        token = self.ids.get(part)
        return [self.byte_ids[b] for b in part.encode()] if token is None else [token]
