"""Start-up: fresh processes, in turns. What a person waits for before anything happens."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

from ..contest import Contest, Options
from ..launch import first_character, same_blas, statement_seconds
from ..result import OURS, Figure
from ..subject import mlx_lm_setting
from ..turns import Reply
from . import Case

Waits = dict[str, Callable[[], float]]  # by player, the seconds one fresh process takes

QUESTION = "What is the capital of France? Answer in one sentence."


def cases(options: Options) -> list[Case]:
    ways = {"import": imports, "import and load": loads, "shell to first token": shells}
    return [Case("startup", name, partial(run, name=name, commands=way)) for name, way in ways.items()]


def seconds(reply: Reply) -> float:
    return reply["seconds"]


def imports(contest: Contest) -> Waits:
    statements = {OURS: "import mlxrt", "mlx-lm": "import mlx_lm", "llama.cpp": "import xllamacpp"}
    return {name: partial(statement_seconds, s) for name, s in statements.items() if name in contest.sides}


def loads(contest: Contest) -> Waits:
    name = contest.subject.located.name
    found: Waits = {OURS: partial(statement_seconds, f"import mlxrt; mlxrt.load({name!r})")}
    folder = mlx_lm_setting(contest.subject.located).get("folder")
    if "mlx-lm" in contest.sides and folder and contest.ours.told["tokenizer"]:
        found["mlx-lm"] = partial(statement_seconds, f"from mlx_lm import load; load({folder!r})")
    return found


def shells(contest: Contest) -> Waits:
    """Only where there is a tokenizer; mlx-lm gets our BLAS."""
    if not contest.ours.told["tokenizer"]:
        return {}
    common = ["--prompt", QUESTION, "--max-tokens", "4", "--temp", "0", "--model"]
    ours = [sys.executable, "-m", "mlxrt", "generate", *common, contest.subject.located.name]
    found: Waits = {OURS: partial(first_character, ours, {})}
    folder = mlx_lm_setting(contest.subject.located).get("folder")
    if "mlx-lm" in contest.sides and folder:
        theirs = [sys.executable, "-m", "mlx_lm", "generate", *common, folder]
        found["mlx-lm"] = partial(first_character, theirs, same_blas())
    return found


def run(contest: Contest, name: str, commands: Callable[[Contest], Waits]) -> Iterator[Figure]:
    waits = commands(contest)
    if not waits:
        return
    players = {player: partial(timed, wait) for player, wait in waits.items()}
    rounds = contest.turns(f"startup, {name}").play(players, [seconds])
    yield contest.figure("startup", name, "wait", "s", rounds.values(seconds), higher=False)


def timed(wait: Callable[[], float], r: int) -> Reply:
    """The first of each does not count: bytecode, file cache."""
    return {"seconds": wait()}
