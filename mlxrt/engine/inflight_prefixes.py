"""Prefixes that are being computed: whoever begins like a running prompt waits for it instead of computing it again.

Knows tokens, not memory: what a follower really finds is the prefix store's business when its turn comes.
"""

from collections.abc import Sequence as Many

from .request import Sequence


class Underway:
    """Whole nodes of `size` tokens, each under a number that stands for it and all before it."""

    def __init__(self, size: int):
        self.size = size
        self._by: dict[int, Sequence] = {}  # who computes the node
        self._claimed: dict[Sequence, list[int]] = {}
        self._behind: dict[Sequence, dict[Sequence, int]] = {}  # owner -> who waits until so many tokens are there
        self._before: dict[Sequence, Sequence] = {}  # who waits -> owner

    def chain(self, tokens: Many[int]) -> list[int]:
        found, key = [], 0
        for end in range(self.size, len(tokens) + 1, self.size):
            key = hash((key, *tokens[end - self.size : end]))
            found.append(key)
        return found

    def claim(self, seq: Sequence) -> None:
        """A sequence begins to compute its prompt; what somebody else computes already stays theirs."""
        mine = [key for key in self.chain(seq.prompt)[seq.length // self.size :] if key not in self._by]
        if mine:
            self._by.update(dict.fromkeys(mine, seq))
            self._claimed[seq] = mine

    def wait(self, seq: Sequence, stored: int) -> bool:
        """Put a sequence behind whoever computes more of its prompt than is `stored`; False where nobody does."""
        if not self._by or seq.followed:
            return False
        chain = self.chain(seq.prompt[:-1])  # one token is always left to compute
        for n in range(len(chain), stored // self.size, -1):
            if owner := self._by.get(chain[n - 1]):
                self._behind.setdefault(owner, {})[seq] = n * self.size
                self._before[seq] = owner
                return True
        return False

    def ready(self) -> list[tuple[Sequence, Sequence]]:
        """(owner, follower) where the owner has by now what its follower waited for; nobody waits a second time."""
        found = [(owner, seq) for owner, line in self._behind.items() for seq, n in line.items() if owner.length >= n]
        for _, seq in found:
            self.forget(seq)
            seq.followed = True
        return found

    def leave(self, owner: Sequence) -> list[Sequence]:
        """A sequence computes no prompt any more; those who waited for it."""
        for key in self._claimed.pop(owner, ()):
            del self._by[key]
        left = list(self._behind.get(owner, ()))
        for seq in left:
            self.forget(seq)
        return left

    def forget(self, seq: Sequence) -> None:
        """A sequence waits for nobody any more."""
        owner = self._before.pop(seq, None)
        if owner is not None:
            del self._behind[owner][seq]
            if not self._behind[owner]:
                del self._behind[owner]
