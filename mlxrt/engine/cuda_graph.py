"""CUDA graphs of decode steps: captured once, then launched as one graph.

MLX's host side takes 11 to 15 us for a kernel, whatever the device needs for it. A decode step whose shapes stay is the
same kernels on the same buffers every time, but for a few integers: where its rows' tails end, which blocks they have,
the tokens. So a step that MLX ran and that was captured is launched again without MLX: its graph begins by copying its
integers to where the kernels expect them and ends by copying what the host reads, its tail alternates between two
buffers, its tokens go from the last kernel to the first. A recurrent layer's state alternates likewise; where a tail
begins it is the state the last one ended with.

Only steps that are nothing but our kernels can be captured: every input of every kernel is a constant of the model, an
output of another kernel, or one of the step's own arrays. Everything else is refused, and MLX launches it as before.
MLX does not know when these launches are done: a caller that lets it read what they write waits first.
"""

import logging
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ..cache.memory import TAIL
from ..kernels.cuda.graph import COPY, MAX_STEP_COPIES, Result
from ..kernels.cuda.nvrtc import Launch, Library
from ..models import CausalLM
from .batch import HostTables

log = logging.getLogger("mlxrt")

MAX_BYTES = 1 << 30  # of tails, and of what steps write on their way
ALIGNMENT = 256  # bytes, of what lies in one buffer
WARMUP_STEPS = 16  # steps of a shape before one is captured, which takes as long as several
MAX_SOURCES = 1024  # arrays kept alive for copies: more than any number of steps in flight needs
Live = dict[int, tuple[mx.array, ...]]
Outputs = tuple[Any, ...]  # the tokens as an array, and what the host reads of them
Decode = Callable[..., tuple[Any, Live]]


class Device(Protocol):
    """What launches graphs: kernels/cuda/graph.py, or a stand-in for it in tests."""

    def addresses(self, arrays: list[mx.array]) -> list[int]: ...
    def graph(
        self,
        launches: list[tuple[Launch, list[int]]],
        step: int,
        copies: list[tuple[int, int, int]],
        results: list[Result],
    ) -> Any: ...
    def enter(self) -> None: ...
    def copy(self, copies: list[tuple[int, int, int]]) -> None: ...
    def copy_pieces(self, copies: np.ndarray) -> None: ...
    def upload(self, copies: list[tuple[int, np.ndarray]]) -> None: ...
    def fetch(self, results: list[Result]) -> list[Any]: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class TailPieces(NamedTuple):
    """Where the tails of a group's layers go: rows [pieces, 5] of a row's number and a TailPiece."""

    layers: tuple[int, ...]
    size: int  # tokens in a block
    pieces: np.ndarray


class NotCapturable(Exception):
    """A step does something besides launching our kernels."""


@dataclass
class TailBuffers:
    """Two buffers that the steps of a tail read and write in turn.

    Captured steps whose tails have one shape share them: they are most of what a step of many rows keeps, and only one
    tail is running.
    """

    first: Live  # what a tail's first step reads: zeros, but for recurrent layers, which read the first buffer
    pair: tuple[Live, Live]  # the one read first, and the one written first
    at: dict[str, list[int]]  # addresses: "zeros", "read", "written", and "states", the recurrent layers of "read"
    nbytes: int


@dataclass
class CapturedStep:
    launches: list[Launch]
    addresses: list[list[int]]  # of each launch's inputs and outputs, as they were then
    tokens: mx.array
    results: list[Result]  # what the host reads after every step
    tail: TailBuffers
    outputs: list[mx.array]  # where kernels write besides, kept alive
    constants: list[mx.array]
    buffers: list[
        tuple[mx.array, mx.array, mx.array]
    ]  # a group's block table, where its rows' tails end, and at any step
    sizes: list[int]  # bytes of where a group's tails end at one step
    step: mx.array  # the number of the next step of a tail, for the device
    at: dict[str, list[int]]  # addresses of all these, and of the step's own arrays
    before_mask: int | None = None  # launches before the first that reads the mask; None: there is none
    masks: list[mx.array] = field(default_factory=list)  # the graphs' own, kept alive
    graphs: dict[int, list[Any]] = field(default_factory=dict)
    pools: list[int] = field(default_factory=list)  # their addresses when the graphs were made
    next: int = 0  # what `step` will be when what was launched is done

    @property
    def masked(self) -> bool:
        return self.before_mask is not None

    @property
    def nbytes(self) -> int:
        """But for the tail's."""
        return sum(a.nbytes for a in self.outputs)


@dataclass(frozen=True)
class UnsampledStep:
    """A step whose model part was launched; its sampling waits for the mask."""

    sample: Callable[[np.ndarray], Outputs]  # uint32 [rows, V / 32] -> the step's outputs


class CudaGraphRunner:
    """Called like the compiled step: the same arrays in, the same out, but for what the host reads of tokens.

    `compiled` is what MLX runs, for steps with a mask `compiled_logits`, which ends there. Launched as a graph, such a
    step returns an UnsampledStep. `recurrent`: layers whose tails begin with a state.
    """

    def __init__(
        self,
        step: Decode,
        compiled: Decode,
        model: CausalLM,
        library: Library,
        device: Device,
        max_bytes: int | None = None,
        compiled_logits: Decode | None = None,
        recurrent: frozenset[int] = frozenset(),
    ):
        self._step, self._compiled, self._model = step, compiled, model
        self._compiled_logits, self._recurrent = compiled_logits, recurrent
        self._library, self._device = library, device
        self.captured: OrderedDict[tuple, CapturedStep] = OrderedDict()  # the one used longest ago first
        self._refused: dict[tuple, str] = {}
        self._counts: Counter[tuple] = Counter()  # steps that MLX ran
        self._current: CapturedStep | None = None  # the one whose tail is running
        self._last: tuple[list[HostTables], Live] = (
            [],
            {},
        )  # the groups' tables it used last, and the tail it returned
        self._sources: list[mx.array] = []  # of copies that may still be queued
        self._busy = False  # something launched this way may still be running
        self._flushed = False  # its tail is in the pools, which have not changed since
        self.steps = 0  # launched this way
        self.max_bytes = MAX_BYTES if max_bytes is None else min(MAX_BYTES, max_bytes)  # of all captured steps together

    def __call__(self, used: int, tables: list[HostTables], tokens, batch, index, pools, live):
        key = (tokens.shape, *((where["table"].shape, where.get("variant")) for where in with_tables(index)))
        mine = self._flushed if not used else live is self._last[1]
        if self._current is not None and mine and self._continues(key, used, tokens, tables):
            return self._launch(used)
        if not used:
            self._current = self.captured.get(key)
            if (
                self._current is None
                and self._counts[key] >= WARMUP_STEPS
                and key not in self._refused
                and self.max_bytes
            ):
                return self._run_and_capture(key, tables, tokens, batch, index, pools, live)
            if self._current is not None and self._begin(key, 0, tables, pools, live, tokens):
                return self._launch(used)
        self._current = None
        self._counts[key] += 1
        self.wait()  # MLX will read what is being written
        return self._run_compiled(tokens, batch, index, pools, live)

    def _run_compiled(self, tokens, batch, index, pools, live):
        step = self._compiled_logits if "mask" in index[-1] else self._compiled
        assert step is not None
        return step(tokens, batch, index, pools, live)

    def wait(self) -> None:
        """Until nothing launched this way is running: the next tail looks up all addresses again."""
        self._flushed = False
        if self._busy:
            self._device.wait()
            self._busy = False
            self._sources.clear()

    def close(self) -> None:
        self.wait()
        self._current = None
        self.captured.clear()
        self._device.close()

    def flush(self, live: Live, groups: list[TailPieces]) -> bool:
        """Copy a tail to the pools. False: another step's tail, or one whose states the next would not begin with."""
        now = self._current
        if now is None or live is not self._last[1] or (self._recurrent and live is not now.tail.pair[0]):
            return False
        self._device.enter()
        tail = now.tail.at["read" if live is now.tail.pair[0] else "written"]
        first = dict(zip(sorted(live), accumulate((len(live[layer]) for layer in sorted(live)), initial=0)))
        copies = []
        for layers, size, pieces in groups:
            for n, array in enumerate(live[layers[0]]):
                at = np.array([(now.pools[first[i] + n], tail[first[i] + n]) for i in layers])
                copies.append(make_copies(at, pieces, size, self._tail_form(layers[0], array)))
        self._device.copy_pieces(np.concatenate(copies))
        self._busy = self._flushed = True
        return True

    def _tail_form(self, layer: int, array: mx.array) -> tuple[int, int, int]:
        """Heads, tokens, and bytes of a token of a head, in a row of a layer's tail."""
        if layer in self._recurrent:
            return 1, 1, array.nbytes // array.shape[0]
        _, heads, tokens, width = array.shape
        return heads, tokens, width * array.itemsize

    # A tail that continues

    def _continues(self, key: tuple, used: int, tokens: mx.array, tables: list[HostTables]) -> bool:
        now, given = self._current, self._last[0]
        assert now is not None
        if self.captured.get(key) is not now:
            return False
        if any(a is not b for new, old in zip(tables, given, strict=True) for a, b in zip(new, old)):
            self._upload_tables(now, used, tables)
        if tokens is not now.tokens:  # the host has read them already
            self._copy_tokens(now, tokens, self._device.addresses([tokens])[0])
        return True

    def _copy_tokens(self, now: CapturedStep, tokens: mx.array, at: int) -> None:
        if at != now.at["tokens"][0]:
            self._device.enter()
            self._device.copy([(now.at["tokens"][0], at, tokens.nbytes)])
            self._sources.append(tokens)

    def _upload_tables(self, now: CapturedStep, used: int, tables: list[HostTables]) -> None:
        """The rows' block tables, where their tails end at every step, and which step is the next."""
        self._last = (tables, self._last[1])
        self._device.enter()
        targets = zip(now.at["table"], now.at["steps"], strict=True)
        copies = [copy for to, own in zip(targets, tables, strict=True) for copy in zip(to, own, strict=True)]
        self._device.upload([*copies, (now.at["step"][0], np.array([used], np.uint32))])
        now.next = used

    def _launch(self, used: int) -> tuple[Outputs | UnsampledStep, Live]:
        now = self._current
        assert now is not None
        if now.next != used:
            self._upload_tables(now, used, self._last[0])
        self._device.enter()
        phase = 0 if not used else 1 + (used + 1) % 2
        if phase not in now.graphs:
            now.graphs[phase] = self._build_graphs(now, phase)
        results = now.graphs[phase][0].launch()
        now.next += 1
        live = now.tail.pair[1 - used % 2]
        self._last = (self._last[0], live)
        self._busy, self._flushed = True, False
        self.steps += 1
        return (self._defer_sampling(now, phase) if now.masked else (now.tokens, *results)), live

    def _defer_sampling(self, now: CapturedStep, phase: int) -> UnsampledStep:
        def sample(mask: np.ndarray) -> Outputs:
            self._device.enter()
            self._device.upload([(now.at["mask"][0], mask)])
            results = now.graphs[phase][1].launch()
            self._busy = True
            return now.tokens, *results

        return UnsampledStep(sample)

    def _build_graphs(self, now: CapturedStep, phase: int) -> list[Any]:
        """The graph of a tail's first step, of those that write the first buffer, or of those that write the second.
        Where there is a mask, one up to its first reader and one of the rest."""
        one, other = now.tail.at["read"], now.tail.at["written"]
        read, written = [(now.tail.at["zeros"], other), (other, one), (one, other)][phase]
        to = dict(zip(now.at["pools"], now.pools))
        to |= dict(zip(now.at["read"], read)) | dict(zip(now.at["written"], written))
        for name in ("tokens", "table", "where", "mask"):
            to |= dict(zip(now.at[f"input {name}"], now.at[name]))
        moved = [[to.get(at, at) for at in addresses] for addresses in now.addresses]
        launches, n = list(zip(now.launches, moved)), now.before_mask
        begin = now.at["step"][0], list(zip(now.at["where"], now.at["steps"], now.sizes))
        if n is None:
            return [self._device.graph(launches, *begin, now.results)]
        return [self._device.graph(launches[:n], *begin, []), self._device.graph(launches[n:], 0, [], now.results)]

    # A tail that begins

    def _begin(
        self, key: tuple, used: int, tables: list[HostTables], pools: Live, live: Live, tokens: mx.array
    ) -> bool:
        """False: the constants in the graphs have moved, as happens when they are read on the host."""
        now = self._current
        assert now is not None
        if self._recurrent:
            self.wait()  # MLX reads the states next, which the last tail may still be copied to
        held, states = flatten(pools), flatten(self._states(live))
        first, second = 1 + len(held), 1 + len(held) + len(states)
        at = self._device.addresses([tokens, *held, *states, *now.constants])
        if at[second:] != now.at["constants"]:
            self._drop(key)
            return False
        if at[1:first] != now.pools:
            self.wait()
            now.graphs.clear()
            now.pools = at[1:first]
        self.captured.move_to_end(key)
        self._upload_tables(now, used, tables)
        self._copy_tokens(now, tokens, at[0])
        self._copy_states(now, states, at[first:second])
        return True

    def _states(self, live: Live) -> Live:
        return {layer: arrays for layer, arrays in live.items() if layer in self._recurrent}

    def _copy_states(self, now: CapturedStep, states: list[mx.array], at: list[int]) -> None:
        """The states a tail begins with, to the first buffer."""
        if states:
            sizes = [state.nbytes for state in states]
            self._device.copy(list(zip(now.tail.at["states"], at, sizes, strict=True)))
        self._sources += states
        del self._sources[:-MAX_SOURCES]

    def _drop(self, key: tuple) -> None:
        """Forget a step; it is captured again when it has come as often as a new one."""
        self.wait()
        del self.captured[key], self._counts[key]
        self._current = None

    # A step that MLX runs, and that is captured

    def _run_and_capture(self, key, tables, tokens, batch, index, pools, live):
        self.wait()
        masked = "mask" in index[-1]
        tails = {
            i: tuple(copy_array(a) if i in self._recurrent else mx.zeros_like(a) for a in arrays)
            for i, arrays in live.items()
        }
        asked = self._model.kernels.num_tested
        with self._library.recording() as launches:
            result, out = self._step(tokens, batch, index, pools, tails)
        mx.eval(result, out, tails, live, [launch.outputs for launch in launches])
        if self._model.kernels.num_tested == asked:  # otherwise some of its launches belong to a self-test
            try:
                self._store(key, self._capture(launches, tokens, index, pools, live, tails, result, out))
            except NotCapturable as reason:
                if str(reason) not in self._refused.values():
                    log.info(f"decode steps are launched kernel by kernel: {reason}")
                self._refused[key] = str(reason)
                return self._run_compiled(tokens, batch, index, pools, live) if masked else (result, out)
            now = self._current = self.captured[key]
            launches.clear()  # they keep the pools alive
            # The next step goes on from here; one with a mask was sampled without it and is sampled again.
            if self._begin(key, int(not masked), tables, pools, live, tokens if masked else now.tokens):
                if masked:  # the model's part is run again
                    return self._launch(0)
                out = self._share_tail(now, out)
                self._last = (self._last[0], out)
                return (now.tokens, *self._device.fetch(now.results)), out
        return self._run_compiled(tokens, batch, index, pools, live) if masked else (result, out)

    def _share_tail(self, now: CapturedStep, out: Live) -> Live:
        """The buffer the next step reads, with the tail that MLX's step has written to arrays of its own."""
        written = now.tail.pair[1]
        if out is not written:
            self._device.enter()
            arrays = flatten(out)
            sizes = [array.nbytes for array in arrays]
            self._device.copy(list(zip(now.tail.at["written"], now.at["written"], sizes, strict=True)))
            self._sources += arrays
            self._busy, self._flushed = True, False
        return written

    def _store(self, key: tuple, known: CapturedStep) -> None:
        if (nbytes := count_bytes([known])) > self.max_bytes:
            raise NotCapturable(f"{key[0][0]} rows would keep {nbytes >> 20} MB of {self.max_bytes >> 20} MB")
        while self.captured and count_bytes([*self.captured.values(), known]) > self.max_bytes:
            self._drop(next(iter(self.captured)))
        self.captured[key] = known

    def _capture(self, launches, tokens, index, pools, live, tails, result, out) -> CapturedStep:
        tables = with_tables(index)
        masks = [where["mask"] for where in index if "mask" in where]
        sizes = [(group["table"].size, group["where"].size) for group in tables]
        buffers = [(own_buffer(table), own_buffer(where), own_buffer(TAIL * where)) for table, where in sizes]
        step, own_masks = own_buffer(1), [mx.zeros_like(mask) for mask in masks]
        mx.eval(buffers, step, masks, own_masks)
        outputs = [a for launch in launches for a in launch.outputs]
        fixed = {id(a) for a in self._model.constants()}
        used = {id(a): a for launch in launches for a in launch.inputs if id(a) in fixed}
        special = {
            "input tokens": [tokens],
            "input table": [where["table"] for where in tables],
            "input where": [where["where"] for where in tables],
            "input mask": masks,
            "pools": flatten(pools),
            "read": flatten(tails),
        }
        own = {
            "tokens": [result[0]],
            "result": list(result[1:]),
            "written": flatten(out),
            "table": [table for table, _, _ in buffers],
            "where": [where for _, where, _ in buffers],
            "steps": [steps for _, _, steps in buffers],
            "step": [step],
            "mask": own_masks,
            "constants": list(used.values()),
        }
        named = special | own
        first = live | self._states(tails)
        every = [*flatten(first), *(a for arrays in named.values() for a in arrays)]
        every += [a for launch in launches for a in (*launch.inputs, *launch.outputs)]
        distinct = {id(a): a for a in every}
        at = dict(zip(distinct, self._device.addresses(list(distinct.values()))))
        check_capturable(launches, outputs, used, [a for arrays in special.values() for a in arrays], own, at)
        names = {name: [at[id(a)] for a in arrays] for name, arrays in named.items()}
        lasting = {address for name in ("tokens", "result", "written") for address in names[name]}
        inside = {at[id(a)]: a.nbytes for a in outputs if at[id(a)] not in lasting}
        addresses = [[at[id(a)] for a in (*launch.inputs, *launch.outputs)] for launch in launches]
        offsets, size = share_memory(addresses, inside)
        shared = mx.zeros((size,), mx.uint8)
        [base] = self._device.addresses([shared])
        moves = {address: base + offset for address, offset in offsets.items()}
        return CapturedStep(
            [replace(launch, inputs=[], outputs=[]) for launch in launches],  # MLX would copy a pool that is referenced
            [[moves.get(address, address) for address in one] for one in addresses],
            result[0],
            [Result(at[id(a)], a.shape, a.dtype) for a in result[1:]],
            self._find_tail(tails) or self._make_tail(first, tails, out, at),
            [shared, *result],
            list(used.values()),
            buffers,
            [group["where"].nbytes for group in tables],
            step,
            names,
            next((i for i, launch in enumerate(launches) for a in launch.inputs for m in masks if a is m), None),
            own_masks,
        )

    def _find_tail(self, tails: Live) -> TailBuffers | None:
        """Buffers of the same shapes that captured steps have."""
        return next((k.tail for k in self.captured.values() if list_shapes(k.tail.pair[0]) == list_shapes(tails)), None)

    def _make_tail(self, first: Live, tails: Live, out: Live, at: dict[int, int]) -> TailBuffers:
        layers = {"zeros": first, "read": tails, "written": out, "states": self._states(tails)}
        arrays = {name: flatten(live) for name, live in layers.items()}
        nbytes = {at[id(a)]: a.nbytes for some in arrays.values() for a in some}
        found = {name: [at[id(a)] for a in some] for name, some in arrays.items()}
        return TailBuffers(first, (tails, out), found, sum(nbytes.values()))


def count_bytes(steps: list[CapturedStep]) -> int:
    """What captured steps keep, tails that they share counted once."""
    return sum(k.nbytes for k in steps) + sum({id(k.tail): k.tail.nbytes for k in steps}.values())


def share_memory(launches: list[list[int]], sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Places in one buffer for what the launches of a step write and only they read, so that it is as large as what is
    needed at once: its layers write the same places.

    `launches`: the addresses each one reads and writes; `sizes`: bytes of what is to be placed, by address. Returns the
    offset of every address at or within one of those, and the bytes of the whole.
    """
    starts = sorted(sizes)
    owners: dict[int, int] = {}  # an address -> the array it lies in
    uses: dict[int, tuple[int, int]] = {}  # an array -> the first and the last launch with it
    for n, addresses in enumerate(launches):
        for address in addresses:
            i = bisect_right(starts, address) - 1
            if i < 0 or address >= starts[i] + sizes[starts[i]]:
                continue
            owners[address] = starts[i]
            uses[starts[i]] = uses.get(starts[i], (n, n))[0], n
    held: list[tuple[int, int, int]] = []  # offset, end, and the last launch that needs it
    placed: dict[int, int] = {}
    for start, (begin, last) in sorted(uses.items(), key=lambda use: use[1]):
        held = sorted(one for one in held if one[2] >= begin)
        at = 0
        for offset, end, _ in held:
            if at + sizes[start] <= offset:
                break
            at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
        placed[start] = at
        held.append((at, at + sizes[start], last))
    total = max((placed[start] + sizes[start] for start in placed), default=1)
    return {address: placed[start] + address - start for address, start in owners.items()}, total


def make_copies(at: np.ndarray, pieces: np.ndarray, size: int, form: tuple[int, int, int]) -> np.ndarray:
    """Copies from tails to pools, an array of every layer of a group. `at` [layers, 2]: addresses of pools and tails;
    `pieces`, `size`: as in TailPieces; `form`: of a tail's rows, whose heads a block has as well."""
    (heads, length, nbytes), (row, first, block, slot, tokens) = form, pieces.T
    copies = np.empty((len(at), len(pieces)), COPY)
    copies["to"] = at[:, :1] + (block * heads * size + slot) * nbytes
    copies["source"] = at[:, 1:] + (row * heads * length + first) * nbytes
    copies["width"], copies["height"] = tokens * nbytes, heads
    copies["to_pitch"], copies["source_pitch"] = size * nbytes, length * nbytes
    return copies.ravel()


def list_shapes(live: Live) -> list[tuple[int, tuple[int, ...], mx.Dtype]]:
    return [(layer, a.shape, a.dtype) for layer in sorted(live) for a in live[layer]]


def with_tables(index: list[dict]) -> list[dict]:
    """Those of a step's groups that have block tables; recurrent layers have states instead."""
    return [where for where in index if "table" in where]


def own_buffer(count: int) -> mx.array:
    """Room for so many numbers. MLX keeps arrays of 8 bytes or less in memory that it shares with the host, whose pages
    may have to move before the device reads them."""
    return mx.zeros((max(count, ALIGNMENT // 4),), mx.uint32)


def copy_array(array: mx.array) -> mx.array:
    """The same numbers in a buffer of their own."""
    return array * mx.array(1, array.dtype)


def flatten(layers: Live) -> list[mx.array]:
    return [a for layer in sorted(layers) for a in layers[layer]]


def check_capturable(launches: list, outputs: list, constants: dict, special: list, own: dict, at: dict) -> None:
    """NotCapturable if anything a kernel reads, or the step returns, was made by something else."""
    if len(own["where"]) > MAX_STEP_COPIES:
        raise NotCapturable(f"{len(own['where'])} kinds of KV caches, graphs take {MAX_STEP_COPIES}")
    written = sorted((at[id(a)], at[id(a)] + a.nbytes) for a in outputs)
    given = {at[id(a)] for a in special}
    if len(given) < len(special):
        raise NotCapturable("two of a step's arrays share one buffer")
    for launch in launches:
        for a in launch.inputs:
            address = at[id(a)]
            inside = any(begin <= address and address + a.nbytes <= end for begin, end in written)
            if id(a) not in constants and address not in given and not inside:
                raise NotCapturable(f"{launch.name.rsplit('_of_')[0]} reads what plain MLX makes of a step's arrays")
    starts = {begin for begin, _ in written}
    if any(at[id(a)] not in starts for name in ("tokens", "result", "written") for a in own[name]):
        raise NotCapturable("what a step gives is made by plain MLX")
