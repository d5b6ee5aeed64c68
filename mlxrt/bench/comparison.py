"""One comparison: the same questions to every engine, interleaved; every answer checked against mlxrt's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..errors import MlxrtError
from .backend import Backend, BackendFailed, BackendRefused
from .bench_model import BenchModel
from .interleave import Interleave, Measure, Reply, Rounds, accept_all
from .result import OURS, Figure, figure
from .statistics import StoppingRule
from .tokens import TIE_8BIT, TIES

Questions = Callable[[str, int], list[dict[str, Any]]]  # engine, round -> questions; the last answer counts
WALL, PROCESSOR = "at", "used"  # which clock of a reply is read


class IncompleteAnswer(MlxrtError):
    """An engine gave fewer tokens than it was asked for, so its time means nothing."""


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    lengths: tuple[int, ...]  # of prompts
    decoded: int  # tokens of a round
    rule: StoppingRule
    requests: int = 4  # of a batch
    kv: tuple[str, ...] = ("q8", "q4", "k8v4")  # KV cache kinds compared with full precision


@dataclass
class Comparison:
    """What a case needs: backends, prompts, device peak rates and a time limit."""

    model: BenchModel
    backends: dict[str, Backend]
    options: Options
    device_peak: Mapping[str, Any]
    prompts: Callable[[int, int], list[int]]  # number of tokens, which section of the text
    stop: Callable[[], bool] = lambda: False
    on_round: Callable[[str, int, float], None] = lambda label, rounds, share: None
    problems: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)  # engines that refused the current case
    clock: str = WALL
    restarts: int = 0  # of every backend within a case
    processes: int = 1  # of every backend in the last case
    time_limit: float = 30.0  # seconds for the current case
    real_text: bool = False  # whether prompts are text, not random tokens
    detokenize: Callable[[list[int]], str] | None = None  # for servers that take text only

    @property
    def ours(self) -> Backend:
        return self.backends[OURS]

    @property
    def context(self) -> int:
        return self.ours.info["context"]

    @property
    def on_cpu(self) -> bool:
        """On a CPU any request warms an engine up; on a GPU every shape has its own kernels to compile."""
        return self.ours.info["device"] == "cpu"

    def seconds(self, reply: Reply, first: int, last: int) -> float:
        """Seconds between two tokens of a reply by this comparison's clock; -1 is the call."""
        ticks = reply[self.clock]
        return ticks[last] - (ticks[first] if first >= 0 else 0.0)

    def interleave(self, label: str) -> Interleave:
        rule = self.options.rule
        limited = replace(rule, seconds=min(rule.seconds, self.time_limit))
        restart_every = -(-rule.min_rounds // (self.restarts + 1))
        restart = self._restart if self.restarts else None
        on_round = lambda rounds, share: self.on_round(label, rounds, share)  # noqa: E731
        return Interleave(limited, self.stop, restart, restart_every, on_round)

    def _restart(self) -> None:
        """Start every backend in a new process, so that differences between processes become ordinary noise."""
        for name, backend in self.backends.items():
            backend.close()
            self.backends[name] = backend.restart()

    def run(
        self,
        label: str,
        questions: Questions,
        measures: list[Measure],
        *,
        engines: dict[str, str] | None = None,
        check: bool = True,
    ) -> Rounds:
        """Ask every engine in turn. `engines` maps engine names to backends: one backend may serve several.

        An engine that fails drops out. `check`: whether answers must equal ours.
        """
        self.refused.clear()
        chosen = engines or {name: name for name in self.backends}
        runs = {name: partial(self._ask, name, backend, questions) for name, backend in chosen.items()}
        checked = partial(self._check_round, questions) if check else accept_all
        rounds = self.interleave(label).run(runs, measures, check=checked)
        self.processes = rounds.processes
        return rounds

    def figure(
        self, suite: str, case: str, what: str, unit: str, values: dict[str, list[float]], **rest: Any
    ) -> Figure:
        """A figure of the last run's rounds."""
        level = self.options.rule.level
        return figure(suite, case, what, unit, values, level=level, processes=self.processes, **rest)

    def _ask(self, name: str, served_by: str, questions: Questions, r: int) -> Reply | None:
        backend = self.backends.get(served_by)
        if backend is None or name in self.refused:
            return None
        replies: list[Reply] = []
        try:
            for question in questions(name, r):
                replies.append(backend.ask(**self._add_text(backend, question)))
                check_complete(name, question, replies[-1])
        except BackendRefused as error:
            if name == OURS:
                raise
            if name not in self.refused:
                self.refused.add(name)
                self.problems.append(f"{name} does not take part: {error}")
            return None
        except (BackendFailed, IncompleteAnswer) as error:
            if backend is self.ours:
                raise
            self.problems.append(f"{error}; {backend.name} takes no further part")
            self.backends.pop(served_by).kill()
            return None
        return replies[-1] | {"before": replies[:-1]}

    def _add_text(self, backend: Backend, question: dict[str, Any]) -> dict[str, Any]:
        """Add the prompt's text for a server behind a URL, which may take nothing else."""
        if self.detokenize is None or not backend.name.startswith("http"):
            return question
        if "requests" in question:
            rows = [row | {"text": self.detokenize(row["prompt"])} for row in question["requests"]]
            return question | {"requests": rows}
        return question | {"text": self.detokenize(question["prompt"])}

    def _check_round(self, questions: Questions, rounds: Rounds, r: int, replies: dict[str, Reply]) -> None:
        """Compare every answer of this round with ours."""
        if OURS not in replies:
            return
        question, ours = questions(OURS, r)[-1], replies[OURS]
        for i, row in enumerate(question.get("requests", [question])):
            for name, reply in replies.items():
                self._compare(rounds, name, row["prompt"], row_of(ours, i), row_of(reply, i))

    def _compare(self, rounds: Rounds, name: str, prompt: list[int], ours: Reply, theirs: Reply) -> None:
        if "tokens" in theirs:
            rounds.agreement.record(name, prompt, theirs["tokens"])
            if name != OURS:
                tie = self.tie(name)
                rounds.agreement.compare(name, prompt, ours["tokens"], theirs["tokens"], tie, self.logit_gap)
        elif self.detokenize is not None and not same_text(self.detokenize(ours["tokens"]), theirs["text"]):
            rounds.agreement.add_remark(f"{name} wrote {theirs['text'][:60]!r}, which is not our text")

    def tie(self, engine: str) -> float:
        return TIE_8BIT if engine.startswith("llama.cpp") else TIES[self.ours.info["dtype"]]

    def logit_gap(self, prompt: list[int], pair: list[int]) -> float:
        return self.ours.ask(do="gap", prompt=prompt, pair=pair)


def row_of(reply: Reply, i: int) -> Reply:
    return reply["rows"][i] if "rows" in reply else reply


def same_text(ours: str, theirs: str) -> bool:
    """Equal but for a last character a server may hold back, and spaces it may strip at the ends."""
    a, b = ours.strip(), theirs.strip()
    return a.startswith(b[:-1]) or b.startswith(a[:-1])


def check_complete(name: str, question: dict[str, Any], reply: Reply) -> None:
    """Refuse an answer with fewer tokens than were asked for."""
    for i, row in enumerate(question.get("requests", [question])):
        answer = row_of(reply, i)
        got = len(answer["tokens"]) if "tokens" in answer else answer["count"]
        if got != row["max_tokens"]:
            raise IncompleteAnswer(f"{name} gave {got} of {row['max_tokens']} tokens")
