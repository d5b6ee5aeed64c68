"""Decode steps on a CPU as recorded lists of kernel calls, run without MLX and without Python between them.

On a small model half of a token's time went into dispatch: MLX's host side, ctypes, a Python frame for every layer. A
decode step whose rows stay is the same calls on the same buffers every time, but for tokens, block tables, where the
rows' tails end, and the pools. So a step is recorded once while it runs, and its list is run again with those replaced.

Only steps that are nothing but our kernels can be recorded: every input of every call is a constant of the model, an
output of another call, or one of the step's own arrays. Any other step runs as before. Tails are extended in place: a
call writes the slot of the new token and reads those before it, so whoever holds an older length sees what it saw.
Where tokens are drawn, what the draw op is told is copied with them; the tail's tokens, which penalties count, come
back anew.
"""

import logging
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import mlx.core as mx
import numpy as np

from ..kernels.cpu.calls import AttentionCall, CallList
from ..kernels.cpu.library import CpuKernels, MadeCall, address_of
from ..models import CausalLM
from .batch import RECENT

log = logging.getLogger("mlxrt")

Live = dict[int, tuple[mx.array, ...]]
Step = Callable[..., tuple[tuple[mx.array, ...], Live]]
Index = list[dict[str, Any]]
Key = tuple[Any, ...]
MAX_STEPS = 8  # recorded steps that are kept: one for every number of rows and way to sample
DRAWS = ("table", "where")  # what the draw op reads of a step's index


class NotRecordable(Exception):
    """A step computes something besides our kernels."""


class Tails:
    """The decode tails that recorded steps write in place, by layer, for one number of rows at a time.

    Steps that sample and steps that do not share them: one goes on where another ended.
    """

    def __init__(self):
        self._own: dict[int, mx.array] = {}

    def take(self, layer: int, given: mx.array) -> mx.array:
        """Our tail of the layer, with the given one's content."""
        own = self._own.get(layer)
        if own is given:
            return own
        if own is None or own.shape != given.shape:
            own = self._own[layer] = mx.zeros(given.shape, given.dtype)
            mx.eval(own)
        np.copyto(np.array(own, copy=False), np.array(given, copy=False))
        return own


def no_array() -> None:
    """A reference to nothing."""


@dataclass
class AttentionSlot:
    """An attention call, the layer whose pool and tail it reads, and the layer's group.

    Addresses are asked for again when an array is another one: asking takes longer than the call of a small layer. The
    arrays are not held, or MLX would copy pools that are written.
    """

    call: AttentionCall
    layer: int
    group: int
    pool: Callable[[], mx.array | None] = no_array
    tail: Callable[[], mx.array | None] = no_array
    table: tuple[int, int] | None = None

    def bind(self, pool: mx.array, tail: mx.array, table: tuple[int, int]) -> None:
        if self.pool() is not pool:
            self.call.pool, self.call.pool_blocks, self.pool = address_of(pool), pool.shape[0], ref(pool)
        if self.tail() is not tail:
            self.call.tail, self.tail = address_of(tail), ref(tail)
        if self.table != table:
            self.call.table, self.call.row_blocks = self.table = table


@dataclass(frozen=True)
class RecordedStep:
    """`tokens`, `ranges`, `draws`, `recent`: the step's own buffers, which its calls read. `outputs`, `after`: where
    calls write its result, and `recent` with the newest token."""

    calls: CallList
    tokens: np.ndarray
    ranges: list[np.ndarray]  # of each group
    draws: dict[str, np.ndarray]
    recent: np.ndarray | None
    after: np.ndarray | None
    attention: list[AttentionSlot]
    outputs: tuple[np.ndarray, ...]
    written: frozenset[int]  # layers whose tails grow
    held: tuple[Any, ...]  # memory that calls name

    def run(self, cpu: CpuKernels, tails: Tails, tokens, index: Index, pools: Live, live: Live):
        mx.eval(pools)  # a flush in the background still reads the tails that are about to be written
        np.copyto(self.tokens, np.array(tokens, copy=False))
        tables = []
        for where, own in zip(index, self.ranges):
            np.copyto(own, np.array(where["where"], copy=False))
            tables.append((address_of(where["table"]), where["table"].shape[1]))
        for name, own in self.draws.items():
            np.copyto(own, np.array(index[-1][name], copy=False))
        if self.recent is not None:
            np.copyto(self.recent, np.array(live[RECENT][0], copy=False))
        after = {i: (tails.take(i, arrays[0]),) if i in self.written else arrays for i, arrays in live.items()}
        for slot in self.attention:
            slot.bind(pools[slot.layer][0], after[slot.layer][0], tables[slot.group])
        cpu.run(self.calls)
        if self.after is not None:
            after[RECENT] = (mx.array(self.after),)
        return tuple(mx.array(a) for a in self.outputs), after


class StepRecorder:
    """Called like the step it records: the same arrays in, the same out."""

    def __init__(self, step: Step, model: CausalLM, group_of: dict[int, int], tails: Tails):
        self._step, self._model, self._group_of, self._tails = step, model, group_of, tails
        self._num_groups = len(set(group_of.values()))
        self._recorded: dict[Key, RecordedStep | None] = {}  # None: not recordable
        self.replays = 0  # steps run from their records

    def __call__(self, tokens, batch, index: Index, pools: Live, live: Live):
        cpu = self._model.kernels.cpu
        assert cpu is not None
        key = self._key(tokens, index)
        if key not in self._recorded:
            return self._record(cpu, key, tokens, batch, index, pools, live)
        if (known := self._recorded[key]) is None:
            return self._step(tokens, batch, index, pools, live)
        self.replays += 1
        return known.run(cpu, self._tails, tokens, index, pools, live)

    def _key(self, tokens, index: Index) -> Key:
        """The number of rows, and how they are sampled."""
        if len(index) == self._num_groups:
            return (tokens.shape[0],)
        return tokens.shape[0], index[-1]["table"].shape[1], index[-1]["variant"]

    def _record(self, cpu: CpuKernels, key: Key, tokens, batch, index: Index, pools: Live, live: Live):
        # Tails of their own, told apart by their addresses: those given may be one array of zeros.
        own = {i: tuple(mx.contiguous(mx.array(a)) for a in arrays) for i, arrays in live.items()}
        tokens = mx.contiguous(tokens)  # of a prompt's step they are a column, which a call would read from a copy
        mx.eval(tokens, own)
        with cpu.recording() as made:
            outputs, after = self._step(tokens, batch, index, pools, own)
        mx.eval(outputs, after)
        while len(self._recorded) >= MAX_STEPS:
            del self._recorded[next(iter(self._recorded))]
        try:
            draws = index[self._num_groups] if len(index) > self._num_groups else {}
            reader = StepReader(self._model, self._group_of, tokens, index[: self._num_groups], draws, pools, own)
            self._recorded[key] = reader.read(made, outputs, after)
        except NotRecordable as reason:
            if None not in self._recorded.values():
                log.info("decode steps are computed call by call: MLX computes a part of them")
                log.debug(f"decode steps: {reason}")
            self._recorded[key] = None
        return outputs, after


class StepReader:
    """Reads the calls of a step that ran: tells by their addresses what every input of every call is."""

    def __init__(
        self,
        model: CausalLM,
        group_of: dict[int, int],
        tokens,
        index: Index,
        draws: dict[str, Any],
        pools: Live,
        live: Live,
    ):
        self.group_of = group_of
        self.tokens = tokens
        self.index = index
        self.draws = {name: draws[name] for name in DRAWS if draws}
        self.recent = live[RECENT][0] if RECENT in live else None
        self.constants = {address_of(a): a for a in model.constants() if a.dtype in (mx.float32, mx.uint32)}
        self.pools = {address_of(arrays[0]): i for i, arrays in pools.items()}
        self.tails = {address_of(arrays[0]): i for i, arrays in live.items() if i != RECENT}
        self.tables = {address_of(where["table"]): g for g, where in enumerate(index)}
        self.ranges = {address_of(where["where"]): g for g, where in enumerate(index)}
        self.made: dict[int, tuple[int, np.ndarray]] = {}  # outputs of calls: bytes, and our buffer
        self.starts: list[int] = []  # their addresses in order

    def read(self, made: list[MadeCall], outputs, after: Live) -> RecordedStep:
        if not made:
            raise NotRecordable("no kernel is used")
        tokens = np.zeros(self.tokens.shape, np.uint32)
        ranges = [np.zeros(where["where"].shape, np.int32) for where in self.index]
        draws = {name: np.zeros(array.shape, np.uint32) for name, array in self.draws.items()}
        recent = None if self.recent is None else np.zeros(self.recent.shape, np.uint32)
        own = {address_of(self.tokens): (self.tokens.nbytes, tokens)}
        own |= {at: (ranges[g].nbytes, ranges[g]) for at, g in self.ranges.items()}
        own |= {address_of(self.draws[name]): (buffer.nbytes, buffer) for name, buffer in draws.items()}
        if self.recent is not None and recent is not None:
            own[address_of(self.recent)] = recent.nbytes, recent
        attention, written = [], set()
        for call in made:
            for name, array in call.inputs.items():
                at = address_of(array)
                if isinstance(call.arguments, AttentionCall) and name in ("pool", "table", "tail"):
                    continue
                size, buffer = own.get(at) or (0, None)
                if buffer is not None and size == array.nbytes:
                    setattr(call.arguments, name, buffer.ctypes.data)
                elif (made_at := self.find_made(at, array.nbytes)) is not None:
                    setattr(call.arguments, name, made_at)
                elif at not in self.constants or self.constants[at].nbytes != array.nbytes:
                    raise NotRecordable(f"{name} of {type(call.arguments).__name__} is made by MLX")
            if isinstance(call.arguments, AttentionCall):
                slot = self.find_slot(call)
                attention.append(slot)
                if "tail" in call.outputs:
                    written.add(slot.layer)
                    self.tails[address_of(call.outputs["tail"])] = slot.layer  # read by layers that share it
            self.add_outputs(call)
        self.check_tails(after)
        results = tuple(self.find_output(array) for array in outputs)
        newer = self.find_output(after[RECENT][0]) if recent is not None else None
        held = (tokens, ranges, draws, recent, [buffer for _, buffer in self.made.values()], self.constants)
        calls = CallList([call.arguments for call in made])
        return RecordedStep(calls, tokens, ranges, draws, recent, newer, attention, results, frozenset(written), held)

    def add_outputs(self, call: MadeCall) -> None:
        for name, array in call.outputs.items():
            if name == "tail":
                continue
            buffer = np.empty(array.shape, np.uint32 if array.dtype == mx.uint32 else np.float32)
            at = address_of(array)
            self.made[at] = array.nbytes, buffer
            insort(self.starts, at)
            setattr(call.arguments, name, buffer.ctypes.data)

    def find_made(self, at: int, size: int) -> int | None:
        """Where our buffers have what a call made at an address, or a part of it, such as some of its rows."""
        if not (before := bisect_right(self.starts, at)):
            return None
        start = self.starts[before - 1]
        made, buffer = self.made[start]
        return buffer.ctypes.data + at - start if at + size <= start + made else None

    def find_slot(self, call: MadeCall) -> AttentionSlot:
        assert isinstance(call.arguments, AttentionCall)
        layer = self.pools.get(address_of(call.inputs["pool"]))
        table = self.tables.get(address_of(call.inputs["table"]))
        if layer is None or table is None or table != self.group_of[layer]:
            raise NotRecordable("attention reads pages of its own")
        if "tail" in call.inputs and self.tails.get(address_of(call.inputs["tail"])) != layer:
            raise NotRecordable("attention reads a tail of its own")
        return AttentionSlot(call.arguments, layer, table)

    def find_output(self, array: mx.array) -> np.ndarray:
        size, buffer = self.made.get(address_of(array), (0, None))
        if buffer is None or size != array.nbytes:
            raise NotRecordable("its result is made by MLX")
        return buffer.reshape(array.shape)

    def check_tails(self, after: Live) -> None:
        """Every layer's tail must be the one that its attention call wrote, or the one it was given."""
        layers = {i: arrays for i, arrays in after.items() if i != RECENT}
        if any(len(arrays) != 1 or self.tails.get(address_of(arrays[0])) != i for i, arrays in layers.items()):
            raise NotRecordable("a layer keeps something besides keys and values")
