"""The prefix store's nodes on disk: kept when a request ends, recalled before one begins.

Nothing that goes wrong here may change an answer or end a request: a record that is not exactly what it should be is
counted, told, removed and computed again, and a disk that cannot be written is told once and left alone.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import BadRequest, BadSnapshot
from ...weights.identity import identity_digest
from .. import Block, LayerState, PrefixCache
from ..memory import KVPools
from ..memory.slices import put
from ..prefix_cache import Node
from .checksummed import inspect_sealed
from .disk_index import Shelf
from .record import Address, Record, addresses, read_record, write_record
from .resume_plan import Route, find_route

log = logging.getLogger("mlxrt")

BATCH = 1 << 28  # bytes read from the device at once
Place = tuple[int, int]  # group, node


@dataclass(frozen=True)
class DiskStats:
    records: int  # of this model
    nbytes: int  # of all models in the folder
    limit: int
    hits: int  # requests that something was recalled for
    misses: int  # requests that nothing more was found for than memory held
    tokens: int  # recalled
    corrupt: int  # damaged or foreign records, none of them used
    evicted: int
    written: int  # records


class DiskStore:
    def __init__(
        self,
        folder: Path,
        nbytes: int,
        identity: dict[str, str],
        store: PrefixCache,
        pools: KVPools,
        flush: Callable[[], None],
        empty: Callable[[], tuple[LayerState, ...]],
    ):
        self.identity, self.store, self.pools, self.flush, self.empty = identity, store, pools, flush, empty
        self.digest = identity_digest(identity)
        self.shelf = Shelf(folder, self.digest, identity, nbytes)
        self.hits = self.misses = self.tokens = self.corrupt = self.evicted = self.written = 0
        self._writable = True

    # From disk

    def recall(self, tokens: Sequence[int]) -> int:
        """Bring into the store what it lacks of this text and the disk has; how many more tokens can be resumed."""
        path = addresses(self.digest, tokens, self.store.size)
        self.shelf.refresh()
        limit = len(path)
        before = self._route(path, tokens, limit, disk=False)
        start = before.depth if before else 0
        while (route := self._route(path, tokens, limit)) and route.depth > start:
            wanted = self._wanted(path, route, tokens)
            if short := self._lacking(wanted, tokens):
                limit = route.depth - short
                continue
            records = self._read(path, wanted)
            # A damaged record, or an eviction on the way, changes what there is to choose from.
            same = route == self._route(path, tokens, limit) and wanted == self._wanted(path, route, tokens)
            if records is None or not same:
                continue
            self._fill(records, path, tokens)
            self.hits += 1
            self.tokens += (route.depth - start) * self.store.size
            return (route.depth - start) * self.store.size
        self.misses += start < len(path)
        return 0

    def _route(self, path: list[Address], tokens: Sequence[int], limit: int, disk: bool = True) -> Route | None:
        if limit < 1:
            return None
        nodes, empty = self.store.path(tokens), self.empty()
        have = [
            [self._held(g, at, nodes) or (disk and self._file(g, at) is not None) for at in path]
            for g in range(len(empty))
        ]
        return find_route(empty, have, len(tokens), self.store.size, limit)

    def _held(self, g: int, at: Address, nodes: list[Node]) -> bool:
        return at.index < len(nodes) and nodes[at.index].pieces[g] is not None

    def _file(self, g: int, at: Address) -> Path | None:
        """The record that has the node's piece of a group."""
        found = [groups for groups in self.shelf.held.get(at.key, ()) if groups >> g & 1]
        return self.shelf.path(at.key, max(found)) if found else None

    def _wanted(self, path: list[Address], route: Route, tokens: Sequence[int]) -> dict[Place, Path]:
        nodes, wanted = self.store.path(tokens), {}
        for g, first in enumerate(route.first):
            for at in path[first : route.depth]:
                if not self._held(g, at, nodes) and (file := self._file(g, at)):
                    wanted[g, at.index] = file
        return wanted

    def _lacking(self, wanted: dict[Place, Path], tokens: Sequence[int]) -> int:
        """Blocks that are missing even after everything but this text was evicted."""
        self.store.use(tokens)
        most = 0
        for g, group in enumerate(self.pools.groups):
            need = sum(1 for place in wanted if place[0] == g)
            while group.pool.idle < need and len(self.store) > len(self.store.path(tokens)):
                self.store.evict(group.pool)
            most = max(most, need - group.pool.idle)
        return most

    def _read(self, path: list[Address], wanted: dict[Place, Path]) -> dict[Place, Record] | None:
        """The records, all of them verified; None where one was not there or not right."""
        files = {file: path[i] for (_, i), file in wanted.items()}
        read = {file: self._checked(file, at) for file, at in files.items()}
        if None in read.values():
            return None
        self.shelf.use(sorted(files, key=lambda file: files[file].index))
        return {place: record for place, file in wanted.items() if (record := read[file]) is not None}

    def _checked(self, file: Path, at: Address) -> Record | None:
        try:
            record = read_record(file, at, self.identity, self.empty())
            self._check_arrays(file, record)
            return record
        except FileNotFoundError:
            self.shelf.remove(file)  # another process evicted it
        except BadSnapshot as error:
            self._discard(file, str(error))
        return None

    def _check_arrays(self, file: Path, record: Record) -> None:
        expected = set()
        for i, g in self.pools.group_of.items():
            for n, pool in enumerate(self.pools.arrays[i] if g in record.described else ()):
                name, found = f"layer.{i}.{n}", record.arrays.get(f"layer.{i}.{n}")
                if found is None or found.shape != pool.shape[1:] or found.dtype != pool.dtype:
                    raise BadSnapshot(f"{file}: no array {name} of {pool.dtype} {pool.shape[1:]}")
                expected.add(name)
        if odd := record.arrays.keys() - expected:
            raise BadSnapshot(f"{file}: nobody asked for {sorted(odd)[0]}")

    def _discard(self, file: Path, reason: str) -> None:
        self.corrupt += 1
        with suppress(OSError):  # not ours to remove: it stays, and is refused again
            file.unlink(missing_ok=True)
        self.shelf.lose(file)
        log.warning(f"disk cache: a record was not used and is removed: {reason}")

    def _fill(self, records: dict[Place, Record], path: list[Address], tokens: Sequence[int]) -> None:
        """Write the pieces into blocks, all of a layer at once, and give them to the store."""
        pools, empty = self.pools, self.empty()
        self.flush()
        blocks = {place: pools.groups[place[0]].pool.take()[0] for place in records}
        mx.synchronize()
        pools.apply_pending()
        for layer, g in pools.group_of.items():
            if mine := [place for place in records if place[0] == g]:
                where = mx.array([blocks[place].check() for place in mine])
                old = pools.arrays.pop(layer)
                new = [mx.stack([records[p].arrays[f"layer.{layer}.{n}"] for p in mine]) for n in range(len(old))]
                pools.arrays[layer] = tuple(put(pool, where, x) for pool, x in zip(old, new))
        pools.arrays = dict(sorted(pools.arrays.items()))
        mx.eval(pools.arrays)
        pieces: list[list[Any]] = [[None] * len(empty) for _ in range(1 + max(i for _, i in records))]
        for (g, i), record in records.items():
            state = empty[g].placed((blocks[g, i],), path[i].end, dict(record.described[g]))
            pieces[i][g] = state.piece(i, self.store.size)
        self.store.graft(tokens, pieces)

    # To disk

    def keep(self, tokens: Sequence[int]) -> int:
        """Write what the store holds of this text and the disk does not; the bytes written."""
        path = addresses(self.digest, tokens, self.store.size)
        nodes = self.store.path(tokens)
        self.shelf.refresh()
        written = 0
        try:
            for batch in self._batches(path, nodes):
                written += self._write(batch)
            self.shelf.use(self.shelf.path(at.key, g) for at in path for g in self.shelf.held.get(at.key, ()))
            self.evicted += self.shelf.trim()
        except (OSError, BadRequest) as error:
            self._writable = False
            log.warning(f"disk cache: nothing more is written to {self.shelf.root}: {error}")
        return written

    def _batches(self, path: list[Address], nodes: list[Node]) -> Iterator[list[tuple[Address, Node]]]:
        """The nodes to write, as many at a time as memory can bear; none beyond what the whole budget could hold."""
        cost = [group.nbytes(1) for group in self.pools.groups]
        batch, size, total = [], 0, 0
        for at, node in zip(path, nodes):
            groups = groups_of(node)
            own = sum(c for g, c in enumerate(cost) if groups >> g & 1)
            total += own
            if total > self.shelf.limit or not self._writable:
                break
            if groups and not any(groups & held == groups for held in self.shelf.held.get(at.key, ())):
                batch.append((at, node))
                size += own
            if size > BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _write(self, batch: list[tuple[Address, Node]]) -> int:
        arrays, before = self._gather(batch), self.shelf.nbytes
        self.shelf.prepare()  # somebody may have removed it
        for i, (at, node) in enumerate(batch):
            groups = groups_of(node)
            described = {g: describe(p, at.index) for g, p in enumerate(node.pieces) if p is not None}
            file = self.shelf.path(at.key, groups)
            write_record(file, at, self.identity, Record(described, arrays[i]))
            self.written += 1
            self.shelf.add(file)
        grown = self.shelf.nbytes - before
        for at, node in batch:
            groups = groups_of(node)
            for less in [g for g in self.shelf.held.get(at.key, ()) if g != groups and g & groups == g]:
                self.shelf.remove(self.shelf.path(at.key, less))
        return grown

    def _gather(self, batch: list[tuple[Address, Node]]) -> list[dict[str, mx.array]]:
        """The arrays of each node, one read per layer."""
        pools = self.pools
        self.flush()
        if pools.pending:
            mx.synchronize()
            pools.apply_pending()
        found: list[dict[str, mx.array]] = [{} for _ in batch]
        for layer, g in pools.group_of.items():
            rows = [i for i, (_, node) in enumerate(batch) if node.pieces[g] is not None]
            if not rows:
                continue
            where = mx.array([place_of(batch[i][1].pieces[g]) for i in rows])
            for n, pool in enumerate(pools.arrays[layer]):
                for i, array in zip(rows, pool[where]):
                    found[i][f"layer.{layer}.{n}"] = array
        mx.eval(found)
        return found

    # As a whole

    def verify(self) -> int:
        """Check every record's bytes; what is damaged is counted and removed. How many were."""
        self.shelf.refresh()
        before = self.corrupt
        for file in list(self.shelf.files()):
            try:
                inspect_sealed(file)
            except FileNotFoundError:
                self.shelf.lose(file)
            except BadSnapshot as error:
                self._discard(file, str(error))
        return self.corrupt - before

    def clear(self) -> None:
        """Remove this model's records."""
        self.shelf.refresh()
        for file in list(self.shelf.files()):
            self.shelf.remove(file)

    def stats(self) -> DiskStats:
        return DiskStats(
            records=len(self.shelf),
            nbytes=self.shelf.nbytes,
            limit=self.shelf.limit,
            hits=self.hits,
            misses=self.misses,
            tokens=self.tokens,
            corrupt=self.corrupt,
            evicted=self.evicted,
            written=self.written,
        )


def groups_of(node: Node) -> int:
    """One bit for each group the node has a piece of."""
    return sum(1 << g for g, piece in enumerate(node.pieces) if piece is not None)


def place_of(piece: Block | LayerState) -> int:
    [block] = (piece,) if isinstance(piece, Block) else piece.blocks
    return block.check()


def describe(piece: Block | LayerState, index: int) -> dict[str, int]:
    return {"first": index} if isinstance(piece, Block) else piece.describe()
