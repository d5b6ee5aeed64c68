"""Prefix cache: a tree of nodes of `node_size` tokens, each with the KV blocks of every layer group.

`resume` returns a state that holds its own blocks, so no prefix can be evicted while it is in use. The key of a stored
state is its own tokens; callers give none. Blocks that window layers release stay here, so an edited prompt resumes
anywhere. The cache counts no bytes: it fills otherwise unused blocks, and an allocation that fails calls `evict`.

A `salt` names a tree of its own: what was stored with one is never found with another, so that clients who must not
learn of each other's prompts by the time an answer takes can share one engine.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from .blocks import Block
from .layer_state import LayerState, SequenceState

NodeBlock = Block | LayerState | None  # a KV block, a checkpoint of a state, or nothing


class Node:
    """Up to `node_size` tokens after its parent's, with a block per group. Only full nodes have children."""

    __slots__ = ("alive", "blocks", "children_by_token", "depth", "full_children", "parent", "reach", "tokens")

    def __init__(self, parent: "Node | None", tokens: tuple[int, ...], blocks: list[Any]):
        self.parent, self.tokens, self.blocks, self.alive = parent, tokens, blocks, True
        self.depth: int = parent.depth + 1 if parent else 0
        self.reach = self.depth  # depth of the deepest node that was ever below it
        self.full_children: dict[tuple[int, ...], Node] = {}
        self.children_by_token: dict[int, list[Node]] = {}  # all children by first token, for partial matches


class PrefixCache:
    def __init__(self, empty: Callable[[], tuple[LayerState, ...]], node_size: int):
        self.empty, self.node_size = empty, node_size
        self.hits = self.misses = self.reused = self.evictions = 0
        self._roots: dict[str, Node] = {}  # by salt
        # In LRU order. A path is touched from its end to the root, so the first node never has children.
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def _root(self, salt: str) -> Node:
        if (root := self._roots.get(salt)) is None:
            for other in [salt for salt, old in self._roots.items() if not old.children_by_token]:
                self._roots.pop(other).alive = False  # here, where nobody is about to add to one
            root = self._roots[salt] = Node(None, (), [])
        return root

    def resume(self, tokens: Sequence[int], salt: str = "") -> SequenceState | None:
        """The longest stored prefix of `tokens`; at least one token is left to compute."""
        path, n = self._match(tuple(tokens), salt)
        state = self._build_state(path, min(n, len(tokens) - 1), tokens)
        if state is None:
            self.misses += 1
            return None
        self._touch(path[-1])
        self.hits += 1
        self.reused += len(state)
        return state

    def _match(self, tokens: tuple[int, ...], salt: str) -> tuple[list[Node], int]:
        """The nodes along `tokens`, the last perhaps only in part, and how many tokens match."""
        if salt not in self._roots:
            return [], 0
        path = self.full_nodes(tokens, salt)
        node, n = path[-1] if path else self._roots[salt], len(path) * self.node_size
        rest = tokens[n : n + self.node_size]
        best, last = 0, None
        for child in node.children_by_token.get(rest[0], ()) if rest else ():
            if (k := common_prefix(child.tokens, rest)) > best:
                best, last = k, child
        return (path, n) if last is None else ([*path, last], n + best)

    def full_nodes(self, tokens: Sequence[int], salt: str = "") -> list[Node]:
        """The full nodes along `tokens`. Counts as neither a hit nor a use."""
        node, text, size = self._roots.get(salt), tuple(tokens), self.node_size
        nodes: list[Node] = []
        while node is not None and (child := node.full_children.get(text[len(nodes) * size : (len(nodes) + 1) * size])):
            node = child
            nodes.append(node)
        return nodes

    def insert_blocks(self, tokens: Sequence[int], blocks: Sequence[list[NodeBlock]], salt: str = "") -> None:
        """Insert the first nodes along `tokens`, one list of blocks per node. What a node has already stays."""
        node, text = self._root(salt), tuple(tokens)
        for i, own in enumerate(blocks):
            node = self._child(node, text[i * self.node_size : (i + 1) * self.node_size], own)
        self._touch(node)

    def touch(self, tokens: Sequence[int], salt: str = "") -> None:
        """Make the path along `tokens` the last to be evicted."""
        if path := self.full_nodes(tokens, salt):
            self._touch(path[-1])

    def block_ids(self, g: int) -> set[int]:
        """The blocks of group g that the cache holds."""
        held = [node.blocks[g] for node in self._nodes if node.blocks and node.blocks[g] is not None]
        return {b.id for one in held for b in (one.blocks if isinstance(one, LayerState) else (one,))}

    def checkpoint_spacing(self, g: int) -> dict[int, int]:
        """How far apart a group's checkpoints are, in tokens: distance -> count."""
        nodes = [node for node in self._nodes if node.blocks and node.blocks[g] is not None]
        counts = Counter(self._checkpoint_gap(node, g) * self.node_size for node in nodes)
        return dict(sorted(counts.items()))

    def _checkpoint_gap(self, node: Node, g: int) -> int:
        """Nodes between a checkpoint and the one before it, or the root."""
        above = node.parent
        while above is not None and above.parent is not None and above.blocks[g] is None:
            above = above.parent
        return node.depth - (above.depth if above is not None else 0)

    def _build_state(self, path: list[Node], n: int, tokens: Sequence[int]) -> SequenceState | None:
        """The longest state of up to n tokens that every group has the blocks for."""
        empty = self.empty()
        blocks = [[node.blocks[g] for node in path] for g in range(len(empty))]
        order = sorted(range(len(empty)), key=lambda g: not empty[g].has_checkpoints)  # they fail most: ask them first
        while n > 0:
            parts: dict[int, LayerState] = {}
            for g in order:
                state = empty[g].from_blocks(blocks[g], n, self.node_size)
                if state is None:
                    break
                parts[g] = state
            else:
                return SequenceState(tuple(tokens[:n]), tuple(parts[g] for g in range(len(empty))))
            n = (n - 1) // self.node_size * self.node_size  # checkpoints lie at the ends of nodes
        return None

    def insert(self, state: SequenceState, after: Node | None = None, salt: str = "") -> Node:
        """Store a state; returns its last full node. `after`: what this returned for a prefix of the same sequence."""
        node = after if after is not None and after.alive else self._root(salt)
        last = node
        for i in range(node.depth, -(-len(state) // self.node_size)):
            key = state.tokens[i * self.node_size : (i + 1) * self.node_size]
            last = self._child(node, key, [part.block_for(i, self.node_size) for part in state.parts])
            if len(key) == self.node_size:
                node = last
        self._touch(last)
        return node

    def _child(self, node: Node, key: tuple[int, ...], blocks: list[Any]) -> Node:
        siblings = node.children_by_token.setdefault(key[0], [])
        if len(key) < self.node_size:
            for child in siblings:
                if child.tokens[: len(key)] == key:
                    return child
        elif known := node.full_children.get(key):
            known.blocks = [old if old is not None else new for old, new in zip(known.blocks, blocks)]
            return known
        for child in [c for c in siblings if len(c.tokens) < self.node_size and key[: len(c.tokens)] == c.tokens]:
            self._remove(child)  # the new one covers it
        child = Node(node, key, blocks)
        node.children_by_token.setdefault(key[0], []).append(child)
        if len(key) == self.node_size:
            node.full_children[key] = child
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
        """Evict something that may free blocks of `pool`: one of its checkpoints, else the least recently used node."""
        if not self._nodes:
            return False
        self.evictions += 1
        groups = [g for g, part in enumerate(self.empty()) if part.has_checkpoints and part.pool is pool]
        if not groups or not self._drop_checkpoint(groups[0]):
            self._remove(next(iter(self._nodes)))
        return True

    def _drop_checkpoint(self, g: int) -> bool:
        """Drop the checkpoint that is missed least: close to the one before it, far from the end. Ends are kept.

        The remaining ones are exponentially further apart the older they are.
        """
        best, victim = 1.0, None
        for node in self._nodes:
            if node.blocks[g] is None or node.reach == node.depth:
                continue
            if (score := self._checkpoint_gap(node, g) / (node.reach - node.depth)) <= best:
                best, victim = score, node
        if victim is None:
            return False
        victim.blocks[g] = None
        return True

    def clear(self) -> None:
        while self._nodes:
            self._remove(next(iter(self._nodes)))

    def _remove(self, node: Node) -> None:
        del self._nodes[node]
        node.alive, node.blocks = False, []  # a running sequence may still name the node, but must not hold its blocks
        parent = node.parent
        assert parent is not None
        siblings = parent.children_by_token[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.children_by_token[node.tokens[0]]
        parent.full_children.pop(node.tokens, None)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
