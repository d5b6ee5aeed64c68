"""Prefixes kept for whoever comes next: a tree of nodes, each `size` tokens with what every group holds of them.

`resume` answers with a value that holds its own blocks, so there is no handle to a prefix that can be evicted under
its user. There is no key a caller can get wrong: what is stored lies under the tokens its own state says it holds.
Window layers keep here what their running sequences let go, so an edited tail resumes anywhere. The store counts no
bytes: whoever needs room calls `evict`, and what is kept is whatever else would lie idle.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from .layer_state import LayerState
from .sequence import SequenceState


class Node:
    """Up to `size` tokens after its parent's. Only full nodes have children."""

    __slots__ = ("alive", "begins", "depth", "full", "parent", "pieces", "reach", "tokens")

    def __init__(self, parent: "Node | None", tokens: tuple[int, ...], pieces: list[Any]):
        self.parent, self.tokens, self.pieces, self.alive = parent, tokens, pieces, True
        self.depth: int = parent.depth + 1 if parent else 0
        self.reach = self.depth  # the deepest node that was ever below it
        self.full: dict[tuple[int, ...], Node] = {}
        self.begins: dict[int, list[Node]] = {}  # all children by their first token, for a match that ends inside one


class PrefixCache:
    def __init__(self, empty: Callable[[], tuple[LayerState, ...]], size: int):
        self.empty, self.size = empty, size
        self.hits = self.misses = self.reused = self.evictions = 0
        self._root = Node(None, (), [])
        # Used longest ago first. A path is touched from its end to the root, so the first one never has children.
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def resume(self, tokens: Sequence[int]) -> SequenceState | None:
        """The longest stored prefix of `tokens`, always leaving one token to compute."""
        path, n = self._walk(tuple(tokens))
        state = self._assemble(path, min(n, len(tokens) - 1), tokens)
        if state is None:
            self.misses += 1
            return None
        self._touch(path[-1])
        self.hits += 1
        self.reused += len(state)
        return state

    def _walk(self, tokens: tuple[int, ...]) -> tuple[list[Node], int]:
        """The nodes along `tokens`, the last perhaps only in part, and how many tokens agree."""
        path = self.path(tokens)
        node, n = path[-1] if path else self._root, len(path) * self.size
        rest = tokens[n : n + self.size]
        best, last = 0, None
        for child in node.begins.get(rest[0], ()) if rest else ():
            if (k := common(child.tokens, rest)) > best:
                best, last = k, child
        return (path, n) if last is None else ([*path, last], n + best)

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

    def held(self, g: int) -> set[int]:
        """The places of group g that some node holds."""
        pieces = [node.pieces[g] for node in self._nodes if node.pieces and node.pieces[g] is not None]
        blocks = [b for piece in pieces for b in (piece.blocks if isinstance(piece, LayerState) else (piece,))]
        return {b.id for b in blocks}

    def spacing(self, g: int) -> dict[int, int]:
        """How far apart the checkpoints of a sparse group lie, in tokens: distance -> how often."""
        found: dict[int, int] = {}
        for node in self._nodes:
            if not node.pieces or node.pieces[g] is None:
                continue
            above = node.parent
            while above is not None and above.parent is not None and above.pieces[g] is None:
                above = above.parent
            distance = (node.depth - (above.depth if above is not None else 0)) * self.size
            found[distance] = found.get(distance, 0) + 1
        return dict(sorted(found.items()))

    def _assemble(self, path: list[Node], n: int, tokens: Sequence[int]) -> SequenceState | None:
        """The longest state up to n tokens that every group has all pieces for."""
        empty = self.empty()
        pieces = [[node.pieces[g] for node in path] for g in range(len(empty))]
        order = sorted(range(len(empty)), key=lambda g: not empty[g].sparse)  # what is seldom there is asked first
        while n > 0:
            parts: dict[int, LayerState] = {}
            for g in order:
                made = empty[g].adopt(pieces[g], n, self.size)
                if made is None:
                    break
                parts[g] = made
            else:
                return SequenceState(tuple(tokens[:n]), tuple(parts[g] for g in range(len(empty))))
            n = (n - 1) // self.size * self.size  # sparse pieces lie at the ends of nodes
        return None

    def put(self, state: SequenceState, after: Node | None = None) -> Node:
        """Keep a state. `after` is an earlier answer for a shorter state of the same sequence: where to go on from."""
        node = after if after is not None and after.alive else self._root
        last = node
        for i in range(node.depth, -(-len(state) // self.size)):
            key = state.tokens[i * self.size : (i + 1) * self.size]
            last = self._child(node, key, [part.piece(i, self.size) for part in state.parts])
            if len(key) == self.size:
                node = last
        self._touch(last)
        return node

    def _child(self, node: Node, key: tuple[int, ...], pieces: list[Any]) -> Node:
        siblings = node.begins.setdefault(key[0], [])
        if len(key) < self.size:
            for child in siblings:
                if child.tokens[: len(key)] == key:
                    return child
        elif known := node.full.get(key):
            known.pieces = [old if old is not None else new for old, new in zip(known.pieces, pieces)]
            return known
        for child in [c for c in siblings if len(c.tokens) < self.size and key[: len(c.tokens)] == c.tokens]:
            self._remove(child)  # the new one says everything it said
        child = Node(node, key, pieces)
        node.begins.setdefault(key[0], []).append(child)
        if len(key) == self.size:
            node.full[key] = child
        self._nodes[child] = None
        above: Node | None = node
        while above is not None and above.reach < child.depth:
            above.reach, above = child.depth, above.parent
        return child

    def _touch(self, node: Node) -> None:
        at: Node | None = node
        while at is not None and at.parent is not None:
            self._nodes.move_to_end(at)
            at = at.parent

    def evict(self, pool: object = None) -> bool:
        """Let go of something that may give `pool` room: a checkpoint where it holds those, else the oldest node."""
        if not self._nodes:
            return False
        self.evictions += 1
        sparse = [g for g, part in enumerate(self.empty()) if part.sparse and part.pool is pool]
        if not sparse or not self._thin(sparse[0]):
            self._remove(next(iter(self._nodes)))
        return True

    def _thin(self, g: int) -> bool:
        """Drop the checkpoint that is missed least: close to the one before it, far from the end. Ends are kept.

        What is left lies exponentially further apart the older it is.
        """
        best, victim = 1.0, None
        for node in self._nodes:
            if node.pieces[g] is None or node.reach == node.depth:
                continue
            above = node.parent
            while above is not None and above.parent is not None and above.pieces[g] is None:
                above = above.parent
            gap = node.depth - (above.depth if above is not None else 0)
            if (score := gap / (node.reach - node.depth)) <= best:
                best, victim = score, node
        if victim is None:
            return False
        victim.pieces[g] = None
        return True

    def clear(self) -> None:
        while self._nodes:
            self._remove(next(iter(self._nodes)))

    def _remove(self, node: Node) -> None:
        del self._nodes[node]
        node.alive, node.pieces = False, []  # a running sequence may still name the node: its blocks go all the same
        parent = node.parent
        assert parent is not None
        siblings = parent.begins[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.begins[node.tokens[0]]
        parent.full.pop(node.tokens, None)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n
