"""Disk store: the nodes of the prefix cache on disk, written when a request ends and recalled before one begins.

A thread of its own writes: every file is hashed and synced, milliseconds for each 32 tokens of a prompt, in which no
step could be launched. What it is to write was copied from the pools before; it never touches them.

No fault here may change an answer or end a request: a record that is not exactly right is counted, logged, removed and
computed again; a disk that cannot be read or written is reported once, and tried again later.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from .checksummed import CannotRead, Encoded, read_verified_header, write_encoded
from .disk_index import DiskIndex
from .record import NodeKey, Record, encode_record, node_keys, read_record
from .resume_plan import ResumePlan, plan_resume

log = logging.getLogger("mlxrt")

BATCH_BYTES = 1 << 28  # read from the device at once
MAX_QUEUED_BYTES = 1 << 29  # copied and not yet written; requests wait beyond it
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
        self._lock = threading.RLock()  # of the index, the counts and all below
        self._writer = ThreadPoolExecutor(1, "mlxrt disk cache")
        self._queued: set[Path] = set()  # records that are being written
        self._jobs: deque[tuple[int, Future[None]]] = deque()  # and their bytes

    # Disk to memory

    def recall(self, tokens: Sequence[int], salt: str = "") -> int:
        """Load what the prefix cache lacks of this prompt and the disk has; returns the tokens gained."""
        try:
            with self._lock:
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

    def save(self, tokens: Sequence[int], salt: str = "") -> None:
        """Have the nodes of this text written that the disk lacks."""
        if time.monotonic() < self._next_write:
            return
        try:
            with self._lock:
                self.index.refresh()
                keys = node_keys(self.digest, tokens, self.prefix_cache.node_size, salt)
                batches = list(self._batches(keys, self.prefix_cache.full_nodes(tokens, salt)))
            for batch in batches:
                self._submit(self._encode(batch))
            self._jobs.append((1, self._writer.submit(self._tidy_up, keys)))
        except OSError as error:
            self._pause_writing(error)

    def _submit(self, records: list[tuple[NodeKey, Path, Encoded]]) -> None:
        """Give them to the writer, once it is not too far behind."""
        with self._lock:
            self._queued |= {file for _, file, _ in records}
        self.wait(MAX_QUEUED_BYTES)
        size = sum(memoryview(part).nbytes for _, _, parts in records for part in parts)
        self._jobs.append((size, self._writer.submit(self._write, records)))

    def wait(self, queued_bytes: int = 0) -> None:
        """Until the writer has no more than so many bytes to write."""
        while self._jobs and (self._jobs[0][1].done() or sum(size for size, _ in self._jobs) > queued_bytes):
            self._jobs.popleft()[1].result()

    def close(self) -> None:
        """Write what is left; nothing can be saved afterwards."""
        self._writer.shutdown()

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
            known = any(groups & mask == groups for mask in self.index.groups.get(key.digest, ()))
            if groups and not known and self.index.path(key.digest, groups) not in self._queued:
                batch.append((key, node))
                size += own
            if size > BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _encode(self, batch: list[tuple[NodeKey, Node]]) -> list[tuple[NodeKey, Path, Encoded]]:
        """The records of nodes, with their files."""
        records = []
        for (key, node), arrays in zip(batch, self._read_pools(batch)):
            metadata = {g: describe(block, key.index) for g, block in enumerate(node.blocks) if block is not None}
            file = self.index.path(key.digest, group_mask(node))
            records.append((key, file, encode_record(key, self.identity, Record(metadata, arrays))))
        return records

    # On the writer's thread

    def _write(self, records: list[tuple[NodeKey, Path, Encoded]]) -> None:
        try:
            self.index.prepare()  # another process may have removed the folder
            for key, file, parts in records:
                write_encoded(file, parts, replace=False)
                with self._lock:
                    self.written += 1
                    self.index.add(file)
                    self._remove_superseded(key)
            with self._lock:
                if "written" in self._faults:
                    self._faults.clear()
                    log.info(f"disk cache: {self.index.root} is written again")
        except OSError as error:
            self._pause_writing(error)
        finally:
            with self._lock:
                self._queued -= {file for _, file, _ in records}

    def _remove_superseded(self, key: NodeKey) -> None:
        """The records of a node that hold fewer of its groups than another."""
        masks = self.index.groups.get(key.digest, set())
        for less in [one for one in masks if any(one != more and one & more == one for more in masks)]:
            self.index.remove(self.index.path(key.digest, less))

    def _tidy_up(self, keys: list[NodeKey]) -> None:
        """Mark a text as used last, and keep the byte limit."""
        try:
            with self._lock:
                groups = self.index.groups
                self.index.touch(self.index.path(key.digest, g) for key in keys for g in groups.get(key.digest, ()))
                self.evicted += self.index.evict()
        except OSError as error:
            self._pause_writing(error)

    def _pause_writing(self, error: OSError) -> None:
        with self._lock:
            self._next_write = time.monotonic() + RETRY_WRITE
            self._report("written", error)

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
        with self._lock:
            return self._verify()

    def _verify(self) -> int:
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
        with self._lock:
            self.index.refresh()
            for file in list(self.index.files()):
                self.index.remove(file)

    def stats(self) -> DiskStats:
        """What is written counts; what is still to be written does not."""
        with self._lock:
            return self._count()

    def _count(self) -> DiskStats:
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
