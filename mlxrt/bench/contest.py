"""The same question to every engine, in turns; every answer checked and compared with ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..errors import MlxrtError
from .result import OURS, Figure, figure
from .side import Refused, Side, SideFailed
from .statistics import Patience
from .subject import MODULES, Subject
from .tokens import TIE_8BIT, TIES
from .turns import Measure, Reply, Rounds, Turns, no_judge

Questions = Callable[[str, int], list[dict[str, Any]]]  # player, round -> what is asked; the last answer counts
WALL, PROCESSOR = "at", "used"  # which of a reply's clocks is read
Roof = Mapping[str, Any]


class BadAnswer(MlxrtError):
    """An engine gave fewer tokens than it was asked for: its time means nothing."""


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    lengths: tuple[int, ...]  # of prompts
    decoded: int  # tokens of a round
    patience: Patience
    requests: int = 4  # of a batch


@dataclass
class Contest:
    """What a case needs: the sides, the prompts, how long it may take."""

    subject: Subject
    sides: dict[str, Side]
    options: Options
    roof: Roof
    prompts: Callable[[int, int], list[int]]  # how many tokens, which stretch of the text
    stop: Callable[[], bool] = lambda: False
    tell: Callable[[str, int, float], None] = lambda label, rounds, share: None
    problems: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)  # players of the case that runs
    clock: str = WALL
    restarts: int = 0  # of every side within a case
    processes: int = 1  # of every side, in the case played last
    allowance: float = 30.0  # seconds the case that runs may take
    language: bool = False  # whether prompts are words of a language
    texts: Callable[[list[int]], str] | None = None  # tokens as text, for servers that take nothing else

    @property
    def ours(self) -> Side:
        return self.sides[OURS]

    @property
    def context(self) -> int:
        return self.ours.told["context"]

    @property
    def on_cpu(self) -> bool:
        """There anything warms an engine up; on a GPU every shape has kernels of its own to be made first."""
        return self.ours.told["device"] == "cpu"

    def spent(self, reply: Reply, first: int, last: int) -> float:
        """Seconds between two of a reply's tokens, by the clock of this contest; -1 is the call."""
        ticks = reply[self.clock]
        return ticks[last] - (ticks[first] if first >= 0 else 0.0)

    def turns(self, label: str) -> Turns:
        patience = self.options.patience
        limited = replace(patience, seconds=min(patience.seconds, self.allowance))
        block = -(-patience.least // (self.restarts + 1))
        renew = self._renew if self.restarts else None
        return Turns(limited, self.stop, renew, block, lambda rounds, share: self.tell(label, rounds, share))

    def _renew(self) -> None:
        """Every side in a new process. What two processes differ by is then noise like any other."""
        for name, side in self.sides.items():
            side.close()
            self.sides[name] = side.again()

    def alternate(
        self,
        label: str,
        questions: Questions,
        measures: list[Measure],
        *,
        players: dict[str, str] | None = None,
        judged: bool = True,
    ) -> Rounds:
        """The players (every side) in turns; `players` maps each to its side, which may serve several.
        One that fails drops out.

        `judged`: whether their answers must be ours.
        """
        self.refused.clear()
        chosen = players or {name: name for name in self.sides}
        asked = {name: partial(self._ask, name, side, questions) for name, side in chosen.items()}
        judge = partial(self._judge, questions) if judged else no_judge
        rounds = self.turns(label).play(asked, measures, judge=judge)
        self.processes = rounds.processes
        return rounds

    def figure(
        self, suite: str, case: str, what: str, unit: str, values: dict[str, list[float]], **rest: Any
    ) -> Figure:
        """Of the rounds that were played last."""
        level = self.options.patience.level
        return figure(suite, case, what, unit, values, level=level, processes=self.processes, **rest)

    def _ask(self, name: str, served_by: str, questions: Questions, r: int) -> Reply | None:
        side = self.sides.get(served_by)
        if side is None or name in self.refused:
            return None
        replies: list[Reply] = []
        try:
            for asked in questions(name, r):
                replies.append(side.ask(**self._worded(side, asked)))
                complete(name, asked, replies[-1])
        except Refused as error:
            if name == OURS:
                raise
            if name not in self.refused:
                self.refused.add(name)
                self.problems.append(f"{name} does not take part: {error}")
            return None
        except (SideFailed, BadAnswer) as error:
            if side is self.ours:
                raise
            self.problems.append(f"{error}; {side.name} takes no further part")
            self.sides.pop(served_by).abandon()
            return None
        return replies[-1] | {"before": replies[:-1]}

    def _worded(self, side: Side, asked: dict[str, Any]) -> dict[str, Any]:
        """A server behind a URL may take text only."""
        if self.texts is None or side.name == OURS or side.name in MODULES:
            return asked
        if "requests" in asked:
            return asked | {"requests": [one | {"text": self.texts(one["prompt"])} for one in asked["requests"]]}
        return asked | {"text": self.texts(asked["prompt"])}

    def _judge(self, questions: Questions, rounds: Rounds, r: int, replies: dict[str, Reply]) -> None:
        """Every answer of this round beside ours."""
        if OURS not in replies:
            return
        asked, mine = questions(OURS, r)[-1], replies[OURS]
        for i, one in enumerate(asked.get("requests", [asked])):
            answers = {name: row_of(reply, i) for name, reply in replies.items()}
            for name, answer in answers.items():
                self._compare(rounds, name, one["prompt"], row_of(mine, i), answer)

    def _compare(self, rounds: Rounds, name: str, prompt: list[int], ours: Reply, theirs: Reply) -> None:
        if "tokens" in theirs:
            rounds.agreement.note(name, prompt, theirs["tokens"])
            if name != OURS:
                tie = self.tie(name)
                rounds.agreement.compare(name, prompt, ours["tokens"], theirs["tokens"], tie, self.gap)
        elif self.texts is not None and not same_text(self.texts(ours["tokens"]), theirs["text"]):
            rounds.agreement.remark(f"{name} wrote {theirs['text'][:60]!r}, which is not our text")

    def tie(self, player: str) -> float:
        return TIE_8BIT if player.startswith("llama.cpp") else TIES[self.ours.told["dtype"]]

    def gap(self, prompt: list[int], pair: list[int]) -> float:
        return self.ours.ask(do="gap", prompt=prompt, pair=pair)


def row_of(reply: Reply, i: int) -> Reply:
    return reply["rows"][i] if "rows" in reply else reply


def same_text(ours: str, theirs: str) -> bool:
    """A server may hold back a last character that is not certain, or cut the space before the first."""
    a, b = ours.strip(), theirs.strip()
    return a.startswith(b[:-1]) or b.startswith(a[:-1])


def complete(name: str, asked: dict[str, Any], reply: Reply) -> None:
    """Refuse an answer that is shorter than was asked for."""
    for i, one in enumerate(asked.get("requests", [asked])):
        answer = row_of(reply, i)
        got = len(answer["tokens"]) if "tokens" in answer else answer["count"]
        if got != one["max_tokens"]:
            raise BadAnswer(f"{name} gave {got} of {one['max_tokens']} tokens")
