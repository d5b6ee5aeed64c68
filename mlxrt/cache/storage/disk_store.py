"""Disk store: the nodes of the prefix cache on disk, written when a request ends and recalled before one begins.

No fault here may change an answer or end a request: a record that is not exactly right is counted, logged, removed and
computed again; a disk that cannot be read or written is reported once, and tried again later.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ...errors import BadSnapshot, NoRoom
from ...weights.identity import identity_digest
from .. import Block, LayerState, PrefixCache
from ..memory import KVPools
from ..memory.slices import update
from ..prefix_cache import Node, NodeBlock
from .checksummed import CannotRead, read_verified_header
from .disk_index import DiskIndex
from .record import NodeKey, Record, node_keys, read_record, write_record
from .resume_plan import ResumePlan, plan_resume

log = logging.getLogger("mlxrt")

BATCH_BYTES = 1 << 28  # read from the device at once
RETRY_WRITE = 60.0  # seconds after a failure until writing is tried again
GroupNode = tuple[int, int]  # group, index of the node


@dataclass(frozen=True)
class DiskStats:
    records: int  # of this model
    nbytes: int  # of all models in the folder
    limit: int
    hits: int  # requests that something was recalled for
    misses: int  # requests for which the disk had no more than memory
    tokens: int  # recalled
    corrupt: int  # damaged or unexpected records, none of them used
    evicted: int
    written: int  # records


class DiskStore:
    def __init__(
        self,
        folder: Path,
        nbytes: int,
        identity: dict[str, str],
        prefix_cache: PrefixCache,
        pools: KVPools,
        flush: Callable[[], None],
    ):
        self.identity, self.prefix_cache, self.empty = identity, prefix_cache, pools.empty_states
        self.pools, self.flush = pools, flush  # `flush` writes the decode tail to the pools
        self.digest = identity_digest(identity)
        self.index = DiskIndex(folder, self.digest, identity, nbytes)
        self.hits = self.misses = self.tokens = self.corrupt = self.evicted = self.written = 0
        self._faults: set[str] = set()  # what was reported
        self._next_write = 0.0  # on time.monotonic

    # Disk to memory

    def recall(self, tokens: Sequence[int], salt: str = "") -> int:
        """Load what the prefix cache lacks of this prompt and the disk has; returns the tokens gained."""
        try:
            return self._recall(tokens, salt)
        except OSError as error:  # what was read before is in memory or nowhere: `_load` reads no file
            self._report("read", error)
            return 0

    def _recall(self, tokens: Sequence[int], salt: str) -> int:
        size = self.prefix_cache.node_size
        keys = node_keys(self.digest, tokens, size, salt)
        self.index.refresh()
        limit = len(keys)
        before = self._plan(keys, tokens, salt, limit, disk=False)
        start = before.depth if before else 0
        while (plan := self._plan(keys, tokens, salt, limit)) and plan.depth > start:
            files = self._missing_files(keys, plan, tokens, salt)
            if short := self._blocks_short(files, tokens, salt):
                limit = plan.depth - short
                continue
            records = self._read(keys, files)
            # A damaged record, or an eviction meanwhile, changes what there is to choose from.
            same = plan == self._plan(keys, tokens, salt, limit) and files == self._missing_files(
                keys, plan, tokens, salt
            )
            if records is None or not same:
                continue
            try:
                self._load(records, keys, tokens, salt)
            except NoRoom:  # the device holds less than the pools were planned for: only allocating tells
                limit = plan.depth - 1
                continue
            self.hits += 1
            self.tokens += (plan.depth - start) * size
            return (plan.depth - start) * size
        self.misses += start < len(keys)
        return 0

    def _plan(
        self, keys: list[NodeKey], tokens: Sequence[int], salt: str, limit: int, disk: bool = True
    ) -> ResumePlan | None:
        if limit < 1:
            return None
        nodes, empty = self.prefix_cache.full_nodes(tokens, salt), self.empty()
        available = [
            [self._in_memory(g, key, nodes) or (disk and self._find_file(g, key) is not None) for key in keys]
            for g in range(len(empty))
        ]
        return plan_resume(empty, available, len(tokens), self.prefix_cache.node_size, limit)

    def _in_memory(self, g: int, key: NodeKey, nodes: list[Node]) -> bool:
        return key.index < len(nodes) and nodes[key.index].blocks[g] is not None

    def _find_file(self, g: int, key: NodeKey) -> Path | None:
        """The record that has the node's block of a group."""
        masks = [groups for groups in self.index.groups.get(key.digest, ()) if groups >> g & 1]
        return self.index.path(key.digest, max(masks)) if masks else None

    def _missing_files(
        self, keys: list[NodeKey], plan: ResumePlan, tokens: Sequence[int], salt: str
    ) -> dict[GroupNode, Path]:
        """The records of all blocks that the plan needs and memory lacks."""
        nodes, files = self.prefix_cache.full_nodes(tokens, salt), {}
        for g in range(len(plan.first)):
            for key in (keys[i] for i in plan.nodes(g)):
                if not self._in_memory(g, key, nodes) and (file := self._find_file(g, key)):
                    files[g, key.index] = file
        return files

    def _blocks_short(self, files: dict[GroupNode, Path], tokens: Sequence[int], salt: str) -> int:
        """How many blocks are missing even after everything but this prompt was evicted."""
        cache = self.prefix_cache
        cache.touch(tokens, salt)
        short = 0
        for g, group in enumerate(self.pools.groups):
            needed = sum(1 for group_node in files if group_node[0] == g)
            while group.pool.available < needed and len(cache) > len(cache.full_nodes(tokens, salt)):
                cache.evict(group.pool)
            short = max(short, needed - group.pool.available)
        return short

    def _read(self, keys: list[NodeKey], files: dict[GroupNode, Path]) -> dict[GroupNode, Record] | None:
        """The verified records; None where one is gone or damaged."""
        key_of = {file: keys[i] for (_, i), file in files.items()}
        records = {file: self._read_checked(file, key) for file, key in key_of.items()}
        if None in records.values():
            return None
        self._faults.discard("read")
        self.index.touch(sorted(key_of, key=lambda file: key_of[file].index))
        return {at: record for at, file in files.items() if (record := records[file]) is not None}

    def _read_checked(self, file: Path, key: NodeKey) -> Record | None:
        try:
            record = read_record(file, key, self.identity, self.empty())
            self._check_arrays(file, record)
            return record
        except FileNotFoundError:
            self.index.forget(file)  # another process evicted it
        except CannotRead as error:
            self.index.forget(file)  # until the folder changes
            self._report("read", error)
        except BadSnapshot as error:
            self._discard(file, str(error))
        return None

    def _report(self, act: str, error: Exception) -> None:
        """Log the first failure to read or write, until it works again."""
        if act not in self._faults:
            log.warning(f"disk cache: {self.index.root} cannot be {act}, requests go on without it: {error}")
        self._faults.add(act)

    def _check_arrays(self, file: Path, record: Record) -> None:
        expected = set()
        for i, g in self.pools.group_of.items():
            for n, pool in enumerate(self.pools.arrays[i] if g in record.metadata else ()):
                name, array = f"layer.{i}.{n}", record.arrays.get(f"layer.{i}.{n}")
                if array is None or array.shape != pool.shape[1:] or array.dtype != pool.dtype:
                    raise BadSnapshot(f"{file}: no array {name} of {pool.dtype} {pool.shape[1:]}")
                expected.add(name)
        if unexpected := record.arrays.keys() - expected:
            raise BadSnapshot(f"{file}: unexpected array {sorted(unexpected)[0]}")

    def _discard(self, file: Path, reason: str) -> None:
        self.corrupt += 1
        with suppress(OSError):  # not ours to remove: it stays, and is refused again
            file.unlink(missing_ok=True)
        self.index.forget(file)
        log.warning(f"disk cache: a record was not used and is removed: {reason}")

    def _load(self, records: dict[GroupNode, Record], keys: list[NodeKey], tokens: Sequence[int], salt: str) -> None:
        """Write the records into newly allocated blocks, layer by layer, and insert those into the prefix cache."""
        pools, empty = self.pools, self.empty()
        blocks = {at: pools.groups[at[0]].pool.allocate()[0] for at in records}  # NoRoom: nothing has changed
        self.flush()
        mx.synchronize()
        pools.apply_pending()
        for layer, g in pools.group_of.items():
            if own := [at for at in records if at[0] == g]:
                ids = mx.array([blocks[at].check() for at in own])
                old = pools.arrays.pop(layer)
                new = [mx.stack([records[at].arrays[f"layer.{layer}.{n}"] for at in own]) for n in range(len(old))]
                pools.arrays[layer] = tuple(update(pool, ids, x) for pool, x in zip(old, new))
        pools.arrays = dict(sorted(pools.arrays.items()))
        mx.eval(pools.arrays)
        by_node: list[list[NodeBlock]] = [[None] * len(empty) for _ in range(1 + max(i for _, i in records))]
        for (g, i), record in records.items():
            metadata, size = dict(record.metadata[g]), self.prefix_cache.node_size
            by_node[i][g] = empty[g].restore_node(blocks[g, i], i, keys[i].end, metadata, size)
        self.prefix_cache.insert_blocks(tokens, by_node, salt)

    # Memory to disk

    def save(self, tokens: Sequence[int], salt: str = "") -> int:
        """Write the nodes of this text that the disk lacks; returns the bytes written."""
        if time.monotonic() < self._next_write:
            return 0
        try:
            written = self._save(tokens, salt)
        except OSError as error:
            self._next_write = time.monotonic() + RETRY_WRITE
            self._report("written", error)
            return 0
        if written and "written" in self._faults:
            self._faults.clear()
            log.info(f"disk cache: {self.index.root} is written again")
        return written

    def _save(self, tokens: Sequence[int], salt: str) -> int:
        keys = node_keys(self.digest, tokens, self.prefix_cache.node_size, salt)
        nodes, index = self.prefix_cache.full_nodes(tokens, salt), self.index
        index.refresh()
        written = sum(self._write(batch) for batch in self._batches(keys, nodes))
        index.touch(index.path(key.digest, g) for key in keys for g in index.groups.get(key.digest, ()))
        self.evicted += index.evict()
        return written

    def _batches(self, keys: list[NodeKey], nodes: list[Node]) -> Iterator[list[tuple[NodeKey, Node]]]:
        """The nodes to write, in batches of about BATCH_BYTES, up to the byte limit of the disk cache."""
        block_bytes = [group.nbytes(1) for group in self.pools.groups]
        batch, size, total = [], 0, 0
        for key, node in zip(keys, nodes):
            groups = group_mask(node)
            own = sum(n for g, n in enumerate(block_bytes) if groups >> g & 1)
            total += own
            if total > self.index.limit:
                break
            if groups and not any(groups & mask == groups for mask in self.index.groups.get(key.digest, ())):
                batch.append((key, node))
                size += own
            if size > BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _write(self, batch: list[tuple[NodeKey, Node]]) -> int:
        arrays, before = self._read_pools(batch), self.index.nbytes
        self.index.prepare()  # another process may have removed the folder
        for i, (key, node) in enumerate(batch):
            metadata = {g: describe(block, key.index) for g, block in enumerate(node.blocks) if block is not None}
            file = self.index.path(key.digest, group_mask(node))
            write_record(file, key, self.identity, Record(metadata, arrays[i]))
            self.written += 1
            self.index.add(file)
        grown = self.index.nbytes - before
        for key, node in batch:  # records of fewer groups are superseded
            groups = group_mask(node)
            for less in [g for g in self.index.groups.get(key.digest, ()) if g != groups and g & groups == g]:
                self.index.remove(self.index.path(key.digest, less))
        return grown

    def _read_pools(self, batch: list[tuple[NodeKey, Node]]) -> list[dict[str, mx.array]]:
        """The arrays of each node, one read per layer."""
        pools = self.pools
        self.flush()
        if pools.pending:
            mx.synchronize()
            pools.apply_pending()
        arrays: list[dict[str, mx.array]] = [{} for _ in batch]
        for layer, g in pools.group_of.items():
            rows = [(i, block) for i, (_, node) in enumerate(batch) if (block := node.blocks[g]) is not None]
            if not rows:
                continue
            ids = mx.array([block_id(block) for _, block in rows])
            for n, pool in enumerate(pools.arrays[layer]):
                for (i, _), array in zip(rows, pool[ids]):
                    arrays[i][f"layer.{layer}.{n}"] = array
        mx.eval(arrays)
        return arrays

    def verify(self) -> int:
        """Check every record's bytes, remove the damaged ones; returns how many there were."""
        self.index.refresh()
        before = self.corrupt
        for file in list(self.index.files()):
            try:
                read_verified_header(file)
            except FileNotFoundError:
                self.index.forget(file)
            except BadSnapshot as error:
                self._discard(file, str(error))
        return self.corrupt - before

    def clear(self) -> None:
        """Remove this model's records."""
        self.index.refresh()
        for file in list(self.index.files()):
            self.index.remove(file)

    def stats(self) -> DiskStats:
        return DiskStats(
            records=len(self.index),
            nbytes=self.index.nbytes,
            limit=self.index.limit,
            hits=self.hits,
            misses=self.misses,
            tokens=self.tokens,
            corrupt=self.corrupt,
            evicted=self.evicted,
            written=self.written,
        )


def group_mask(node: Node) -> int:
    """One bit for each group the node has a block of."""
    return sum(1 << g for g, block in enumerate(node.blocks) if block is not None)


def block_id(node_block: Block | LayerState) -> int:
    [block] = (node_block,) if isinstance(node_block, Block) else node_block.blocks
    return block.check()


def describe(node_block: Block | LayerState, index: int) -> dict[str, int]:
    return {"first": index} if isinstance(node_block, Block) else node_block.describe()
