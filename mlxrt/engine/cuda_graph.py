"""Decode steps that repeat themselves, on CUDA: recorded once, then launched as one graph.

MLX's host side takes 11 to 15 us for a kernel, whatever the device needs for it. A decode step whose shapes stay is the
same kernels on the same buffers every time, but for a few numbers: where its rows' tails end, which blocks they have,
the tokens. So a step that MLX ran and that was recorded is launched again without MLX: its numbers are copied to where
the kernels expect them, its tail goes from one of two sides to the other, its tokens from the last kernel to the first.

Only steps that are nothing but our kernels can be recorded: every input of every kernel is a constant of the model, an
output of another kernel, or one of the step's own arrays. Everything else is refused, and MLX launches it as before.
MLX does not know when these launches are done: whoever lets it read what they write waits first.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import mlx.core as mx

from ..kernels.cuda.nvrtc import Launch, Library
from ..models import CausalLM

log = logging.getLogger("mlxrt")

HOLD = 512 << 20  # bytes
ENOUGH = 16  # steps of a shape before one is recorded, which takes as long as several: some come once, and go
SOURCES = 256  # arrays that are held for copies: more than any number of steps in the air needs
PIECES = 512  # copies, of a microsecond each, that write a tail to the pools
Live = dict[int, tuple[mx.array, ...]]
Made = tuple[Any, Any]  # the tokens as an array, and what the host reads of them
Decode = Callable[..., tuple[Made, Live]]


class Device(Protocol):
    """What launches graphs: kernels/cuda_graph.py, or what stands in for it."""

    def addresses(self, arrays: list[mx.array]) -> list[int]: ...
    def graph(self, launches: list[tuple[Launch, list[int]]]) -> Any: ...
    def enter(self) -> None: ...
    def copy(self, to: int, source: int, nbytes: int) -> None: ...
    def fetch(self, address: int, shape: tuple[int, int]) -> Any: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class NotAlone(Exception):
    """A step does something besides launching our kernels."""


@dataclass
class Recorded:
    launches: list[Launch]
    addresses: list[list[int]]  # of each launch's inputs and outputs, as they were then
    tokens: mx.array
    sides: tuple[Live, Live]  # what is read first, and what is written first
    zeros: Live  # what is read by the first step of a tail
    constants: list[mx.array]
    buffers: list[tuple[mx.array, mx.array]]  # a group's table and where its rows' tails end
    at: dict[str, list[int]]  # addresses of all these, and of the step's own arrays
    nbytes: int
    graphs: dict[int, Any] = field(default_factory=dict)
    pools: list[int] = field(default_factory=list)  # where they lay when the graphs were made
    steps: list[int] = field(default_factory=list)  # where a group's numbers of all steps of this tail lie


class Replay:
    """Stands where the compiled step would: the same arrays in, the same out, but for what the host reads of tokens."""

    def __init__(
        self,
        step: Decode,
        compiled: Decode,
        model: CausalLM,
        library: Library,
        device: Device,
    ):
        self._step, self._compiled, self._model = step, compiled, model
        self._library, self._device = library, device
        self._known: OrderedDict[tuple, Recorded] = OrderedDict()
        self._refused: dict[tuple, str] = {}
        self._seen: Counter[tuple] = Counter()  # steps that MLX ran
        self._now: Recorded | None = None  # whose tail is running
        self._given: tuple[list, Live] = ([], {})  # the groups' arrays it has, and the tail it gave last
        self._sources: list[mx.array] = []  # of copies that may still be waiting for their turn
        self._busy = False  # something launched this way may still be running
        self._kept = False  # its tail is in the pools, and nobody else has been there since
        self.steps = 0  # launched this way
        self.most = HOLD  # that all recorded steps together may keep

    def __call__(self, used: int, tokens, batch, index, pools, live):
        key = (tokens.shape, *(where["table"].shape for where in index))
        mine = self._kept if not used else live is self._given[1]
        if self._now is not None and mine and self._goes_on(key, tokens, index):
            return self._launch(used)
        if not used:
            self._now = self._known.get(key)
            if self._now is None and self._seen[key] >= ENOUGH and key not in self._refused and self.most:
                return self._record(key, tokens, batch, index, pools, live)
            if self._now is not None and self._begin(key, index, pools, tokens):
                return self._launch(used)
        self._now = None
        self._seen[key] += 1
        self.wait()  # MLX will read what is being written
        return self._compiled(tokens, batch, index, pools, live)

    def wait(self) -> None:
        """Until nothing launched this way is running: the next tail must find out where things lie by then."""
        self._kept = False
        if self._busy:
            self._device.wait()
            self._busy = False
            self._sources.clear()

    def close(self) -> None:
        self.wait()
        self._now = None
        self._known.clear()
        self._device.close()

    def keep(self, live: Live, places: dict[int, list[int]], nbytes: dict[int, int]) -> bool:
        """A whole tail into the pools, as blocks of so many bytes at these places. False: not ours, or too many."""
        now = self._now
        if now is None or live is not self._given[1] or sum(map(len, places.values())) > PIECES:
            return False
        self._device.enter()
        tail = now.at["read" if live is now.sides[0] else "written"]
        for source, pool, layer in zip(tail, now.pools, sorted(places), strict=True):
            for row, place in enumerate(places[layer]):
                self._device.copy(pool + place * nbytes[layer], source + row * nbytes[layer], nbytes[layer])
        self._busy = self._kept = True
        return True

    # A tail that goes on

    def _goes_on(self, key: tuple, tokens: mx.array, index: list[dict]) -> bool:
        now, given = self._now, self._given[0]
        assert now is not None
        if self._known.get(key) is not now:
            return False
        new = arrays_of(index)
        if any(a is not b for a, b in zip(new, given, strict=True)):
            self._place(now, new, self._device.addresses(new))
        if tokens is not now.tokens:  # the host has read them already
            self._take(now, tokens, self._device.addresses([tokens])[0])
        return True

    def _take(self, now: Recorded, tokens: mx.array, at: int) -> None:
        if at != now.at["tokens"][0]:
            self._device.enter()
            self._device.copy(now.at["tokens"][0], at, tokens.nbytes)
            self._sources.append(tokens)

    def _place(self, now: Recorded, new: list[mx.array], at: list[int]) -> None:
        """Where the rows' blocks are, and where to find how long their tails are."""
        self._sources += self._given[0]
        del self._sources[:-SOURCES]
        self._given = (new, self._given[1])
        now.steps = at[1::2]
        self._device.enter()
        for to, source, (own, _) in zip(now.at["table"], at[::2], now.buffers):
            self._device.copy(to, source, own.nbytes)

    def _launch(self, used: int) -> tuple[Made, Live]:
        now, device = self._now, self._device
        assert now is not None
        device.enter()
        for to, source, (_, own) in zip(now.at["where"], now.steps, now.buffers):
            device.copy(to, source + used * own.nbytes, own.nbytes)
        turn = 0 if not used else 1 + (used + 1) % 2
        if turn not in now.graphs:
            now.graphs[turn] = self._graph(now, turn)
        now.graphs[turn].launch()
        live = now.sides[1 - used % 2]
        self._given = (self._given[0], live)
        self._busy, self._kept = True, False
        self.steps += 1
        return (now.tokens, self._told(now)), live

    def _told(self, now: Recorded) -> Any:
        """For the host. To read the array itself would move it away from where the kernels write."""
        return self._device.fetch(now.at["told"][0], (now.tokens.shape[0], 2))

    def _graph(self, now: Recorded, turn: int) -> Any:
        """Of the first step of a tail, of those that write the side that is read first, or of the others."""
        one, other = now.at["read"], now.at["written"]
        read, written = [(now.at["zeros"], other), (other, one), (one, other)][turn]
        to = dict(zip(now.at["pools"], now.pools)) | dict(zip(one, read)) | dict(zip(other, written))
        for name in ("tokens", "table", "where"):
            to |= dict(zip(now.at[f"given {name}"], now.at[name]))
        moved = [[to.get(at, at) for at in addresses] for addresses in now.addresses]
        return self._device.graph(list(zip(now.launches, moved)))

    # A tail that begins

    def _begin(self, key: tuple, index: list[dict], pools: Live, tokens: mx.array) -> bool:
        """False: what the graphs have in them lies elsewhere now. That happens when somebody reads it on the host."""
        now = self._now
        assert now is not None
        new, held = arrays_of(index), flat(pools)
        first, second = len(new) + 1, len(new) + 1 + len(held)
        at = self._device.addresses([tokens, *new, *held, *now.constants])
        if at[second:] != now.at["constants"]:
            self._drop(key)
            return False
        if at[first:second] != now.pools:
            self.wait()
            now.graphs.clear()
            now.pools = at[first:second]
        self._known.move_to_end(key)
        self._place(now, new, at[1:first])
        self._take(now, tokens, at[0])
        return True

    def _drop(self, key: tuple) -> None:
        self.wait()
        del self._known[key]
        self._now = None

    # A step that is run by MLX, and recorded

    def _record(self, key, tokens, batch, index, pools, live):
        self.wait()
        sides = {i: tuple(mx.zeros(a.shape, a.dtype) for a in arrays) for i, arrays in live.items()}
        asked = self._model.kernels.num_tested
        with self._library.recording() as launches:
            made, out = self._step(tokens, batch, index, pools, sides)
        mx.eval(made, out, sides, live, [launch.outputs for launch in launches])
        if self._model.kernels.num_tested == asked:  # otherwise there are launches in it that belong to a proof
            try:
                self._keep(key, self._recorded(launches, tokens, index, pools, live, sides, made, out))
            except NotAlone as reason:
                if str(reason) not in self._refused.values():
                    log.info(f"decode steps are launched kernel by kernel: {reason}")
                self._refused[key] = str(reason)
                return made, out
            now = self._now = self._known[key]
            launches.clear()  # they hold the pools
            if self._begin(key, index, pools, now.tokens):  # the next step goes on from here
                self._given = (self._given[0], out)
                return (now.tokens, self._told(now)), out
        return made, out

    def _keep(self, key: tuple, known: Recorded) -> None:
        if known.nbytes > self.most:
            raise NotAlone(f"{key[0][0]} rows would keep {known.nbytes >> 20} MB, {self.most >> 20} are allowed")
        while self._known and sum(k.nbytes for k in self._known.values()) + known.nbytes > self.most:
            self._drop(next(iter(self._known)))
        self._known[key] = known

    def _recorded(self, launches, tokens, index, pools, live, sides, made, out) -> Recorded:
        buffers = [(mx.zeros_like(where["table"]), mx.zeros_like(where["where"])) for where in index]
        mx.eval(buffers)
        outputs = [a for launch in launches for a in launch.outputs]
        fixed = {id(a) for a in self._model.constants()}
        used = {id(a): a for launch in launches for a in launch.inputs if id(a) in fixed}
        special = {
            "given tokens": [tokens],
            "given table": [where["table"] for where in index],
            "given where": [where["where"] for where in index],
            "pools": flat(pools),
            "read": flat(sides),
        }
        own = {
            "tokens": [made[0]],
            "told": [made[1]],
            "written": flat(out),
            "zeros": flat(live),
            "table": [table for table, _ in buffers],
            "where": [where for _, where in buffers],
            "constants": list(used.values()),
        }
        named = special | own
        every = [a for arrays in named.values() for a in arrays]
        every += [a for launch in launches for a in (*launch.inputs, *launch.outputs)]
        distinct = {id(a): a for a in every}
        at = dict(zip(distinct, self._device.addresses(list(distinct.values()))))
        check(launches, outputs, used, [a for arrays in special.values() for a in arrays], own, at)
        kept = {at[id(a)]: a.nbytes for a in (*outputs, *special["read"], *own["zeros"])}
        return Recorded(
            [replace(launch, inputs=[]) for launch in launches],  # a pool that is held would be copied, not written
            [[at[id(a)] for a in (*launch.inputs, *launch.outputs)] for launch in launches],
            made[0],
            (sides, out),
            live,
            list(used.values()),
            buffers,
            {name: [at[id(a)] for a in arrays] for name, arrays in named.items()},
            sum(kept.values()),
        )


def arrays_of(index: list[dict]) -> list[mx.array]:
    """A group's blocks, and for all steps of a tail where its rows end."""
    return [where[name] for where in index for name in ("table", "steps")]


def flat(layers: Live) -> list[mx.array]:
    return [a for layer in sorted(layers) for a in layers[layer]]


def check(launches: list, outputs: list, constants: dict, special: list, own: dict, at: dict[int, int]) -> None:
    """NotAlone if anything a kernel reads, or the step gives, was made by something else."""
    written = sorted((at[id(a)], at[id(a)] + a.nbytes) for a in outputs)
    given = {at[id(a)] for a in special}
    if len(given) < len(special):
        raise NotAlone("two of a step's arrays lie in one place")
    for launch in launches:
        for a in launch.inputs:
            place = at[id(a)]
            inside = any(begin <= place and place + a.nbytes <= end for begin, end in written)
            if id(a) not in constants and place not in given and not inside:
                raise NotAlone(f"{launch.name.rsplit('_of_')[0]} reads what plain MLX makes of a step's arrays")
    starts = {begin for begin, _ in written}
    if any(at[id(a)] not in starts for name in ("tokens", "told", "written") for a in own[name]):
        raise NotAlone("what a step gives is made by plain MLX")
