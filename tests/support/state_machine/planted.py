"""Faults to be planted, one at a time: each breaks one rule the cache lives by. Data only.

`old` must occur exactly once in its file, so that a fault that no longer fits the source is noticed and not skipped.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # below mlxrt/
    old: str
    new: str
    kinds: tuple[str, ...] = ("gemma",)  # where it can show


def fault(name: str, file: str, old: str, new: str, kinds: str = "gemma") -> Fault:
    return Fault(name, file, old, new, tuple(kinds.split()))


STATES, NODES = "cache/layer_state.py", "cache/prefix_cache.py"
KV, RECURRENT = "cache/memory/paged.py", "cache/memory/recurrent.py"

FAULTS = (
    # Blocks
    fault(
        "a shared block is written in place", STATES, "blocks[-1].filled != at  #", "blocks[-1].filled < 0  #", "full"
    ),
    fault("a table goes on when its blocks are others", STATES, "if blocks is self.blocks:", "if True:"),
    fault("a window lets unflushed blocks go", STATES, "self.window - self.slack + 1)", "self.window + 1)", "narrow"),
    fault(
        "a resumed window misses its first block",
        STATES,
        "max(0, n - self.window + 1) // self.size",
        "(max(0, n - self.window + 1) + self.size) // self.size",
        "window",
    ),
    fault(
        "a window's table is read from 0", KV, "base = [s.first * s.size for s in states]", "base = [0 for _ in states]"
    ),
    fault(
        "kept blocks are released",
        STATES,
        "(*blocks[: self.kept], *blocks[self.kept + out - self.first :])",
        "(*blocks[out - self.first :],)",
        "rotating rotating-keep",
    ),
    fault(
        "a rewind forgets that blocks are kept",
        STATES,
        "(self.kept + self.first) * self.size + self.window - 1 if",
        "self.first * self.size + self.window - 1 if",
        "rotating rotating-keep",
    ),
    fault(
        "a resumed window misses its kept blocks",
        STATES,
        "(*every[: self.kept], *every[self.kept + first :])",
        "(*every[first : self.kept + first], *every[self.kept + first :])",
        "rotating rotating-keep",
    ),
    fault(
        "kept tokens are seen where the window begins",
        "kernels/ops/attention.py",
        "mx.where(slots < -(-keep // size) * size, slots, positions) if keep else positions",
        "positions",
        "rotating rotating-keep q4-rotating",
    ),
    fault(
        "a recurrent state is written in place",
        STATES,
        "inner = tuple(zip(lengths, blocks))",
        "inner, last = tuple(zip(lengths, blocks)), self.blocks[0] if self.blocks else last",
        "hybrid recurrent",
    ),
    fault(
        "a new recurrent state is not zero",
        RECURRENT,
        'fresh = index["read"] == 0',
        'fresh = index["read"] < 0',
        "recurrent",
    ),
    fault(
        "a prefill writes one token to all its slots",
        KV,
        "return tuple(update(p, indices, x) for",
        "return tuple(update(p, indices, x[:1]) for",
        "q8",
    ),
    fault(
        "a window sees one token too many",
        "kernels/ops/attention.py",
        "        near = keys > queries - self.window",
        "        near = keys >= queries - self.window",
    ),
    # The prefix cache
    fault("a match is one token too long", NODES, "min(n, len(tokens) - 1)", "min(n + 1, len(tokens) - 1)", "full"),
    fault("a whole prompt is resumed, no token left", NODES, "min(n, len(tokens) - 1)", "min(n, len(tokens))", "full"),
    fault(
        "a key is one token too long",
        NODES,
        "state.tokens[i * self.node_size : (i + 1) * self.node_size]",
        "(*state.tokens, 60)[i * self.node_size : (i + 1) * self.node_size]",
        "full",
    ),
    fault(
        "an evicted node can still be found",
        NODES,
        "parent.full_children.pop(node.tokens, None)",
        "parent.alive = True",
    ),
    fault(
        "an evicted node keeps its blocks",
        NODES,
        "node.alive, node.blocks = False, []",
        "node.alive = False",
        "hybrid full",
    ),
    fault(
        "use refreshes a node, not its path",
        NODES,
        "            at = at.parent\n\n    def evict",
        "            break\n\n    def evict",
    ),
    # Steps
    fault(
        "one layer is left out of a copy",
        "cache/memory/pools.py",
        "                if pairs:\n",
        "                if pairs and i != group.layers[-1]:\n",
        "full",
    ),
    fault(
        "copies are made before the tail is flushed",
        "engine/model_runner.py",
        "        if (t := self.tail) and (not step.decode",
        "        if pending:\n            self.pools.apply_pending()\n            pending = False\n"
        "        if (t := self.tail) and (not step.decode",
        "full gemma",
    ),
    fault(
        "one layer is left out of a flush",
        "engine/model_runner.py",
        "for i, g in self.group_of.items():\n            pools[i] = self.groups[g].spec.flush",
        "for i, g in list(self.group_of.items())[:-1]:\n            pools[i] = self.groups[g].spec.flush",
    ),
    fault(
        "a tail goes on with other rows",
        "engine/model_runner.py",
        "return at == [(row, start + self.used) for row, start in zip(self.rows, self.start)]",
        "return len(at) == len(self.rows)",
        "full gemma",
    ),
    fault(
        "a checkpoint is not flushed",
        "engine/scheduler.py",
        "Step((*rows, *chunks), checkpoint, n)",
        "Step((*rows, *chunks), False, n)",
        "hybrid",
    ),
    fault(
        "a prompt that is cut samples",
        "engine/scheduler.py",
        "seq.length - n, seq.length, n == todo)",
        "seq.length - n, seq.length, True)",
        "full gemma",
    ),
    fault(
        "logits of another row are sampled",
        "engine/model_runner.py",
        "        return hidden[mx.array(ends)], finite",
        "        return hidden[: len(ends)], finite",
    ),
    fault(
        "a draw depends on its row", "engine/sampler.py", "        seq.seed,\n", "        seq.seed + seq.id,\n", "full"
    ),
    fault(
        "a draw forgets tokens in the air",
        "engine/sampler.py",
        "        len(seq) - len(seq.prompt),\n",
        "        len(seq.tokens) - len(seq.prompt),\n",
        "full",
    ),
    # Files
    fault(
        "blocks are saved in another order",
        "cache/memory/pools.py",
        "for b in state.parts[g].blocks]",
        "for b in state.parts[g].blocks[::-1]]",
    ),
    fault(
        "a saved window forgets what it let go",
        STATES,
        'return {"first": self.first}',
        'return {"first": 0}',
        "window narrow",
    ),
    # Arrays
    fault("an array is written under its holders", "cache/memory/slices.py", "fresh = array[...]", "fresh = array"),
)
