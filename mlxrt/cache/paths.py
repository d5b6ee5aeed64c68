"""The prefix store with its paths open: for whoever keeps the same nodes in another place, and brings them back.

Host only, as the store itself: what a piece holds is not looked at.
"""

from collections.abc import Sequence
from typing import Any

from .store import Node, PrefixStore


class PathStore(PrefixStore):
    def path(self, tokens: Sequence[int]) -> list[Node]:
        """The full nodes along `tokens`. Neither a hit nor a use."""
        node, known = self._root, tuple(tokens)
        found: list[Node] = []
        while child := node.full.get(known[len(found) * self.size : (len(found) + 1) * self.size]):
            node = child
            found.append(node)
        return found

    def graft(self, tokens: Sequence[int], pieces: Sequence[list[Any]]) -> None:
        """Give the first nodes along `tokens` these pieces, one list per node. What a node has already stays."""
        node, known = self._root, tuple(tokens)
        for i, held in enumerate(pieces):
            node = self._child(node, known[i * self.size : (i + 1) * self.size], held)
        self._touch(node)

    def use(self, tokens: Sequence[int]) -> None:
        """Make the path along `tokens` the last to be evicted."""
        if path := self.path(tokens):
            self._touch(path[-1])
