"""Sides: engines in processes of their own, asked in JSON, one line a question and one an answer.

Knows nothing of what is measured. The first answer of a side is what it tells of itself, when it is ready.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any, NoReturn, Self

from ..errors import MlxrtError

HERE = "mlxrt.bench.sides"


class SideFailed(MlxrtError):
    """An engine that is compared cannot be started, died, or refused."""

    exit_code = 2


class Refused(SideFailed):
    """It understood the question and cannot serve it; it is still there."""


class Side:
    """One running engine. What it writes to stderr is kept, for the line that says why it died."""

    def __init__(self, name: str, setting: dict[str, Any], *, program: str = "", env: dict[str, str] | None = None):
        self.name, self.gone = name, False
        self.again = partial(Side, name, setting, program=program, env=env)  # the same in a new process
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  as long as the side
        self._process = subprocess.Popen(
            [sys.executable, "-m", program or f"{HERE}.{name.replace('-', '_').replace('.', '_')}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment(env or {}),
            start_new_session=True,  # Ctrl-C is for whoever asks; a side ends when its questions end
        )
        self.told: dict[str, Any] = {}
        try:
            self.told = self.ask(**setting)
        finally:
            if not self.told:
                self.abandon()

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        reply = json.loads(line)
        if isinstance(reply, dict) and "refused" in reply:
            raise Refused(f"{self.name}: {reply['refused']}")
        return reply

    def _fail(self) -> NoReturn:
        status = self._process.wait()
        self._said.seek(0)
        last = (self._said.read().strip().splitlines() or ["it said nothing"])[-1]
        raise SideFailed(f"{self.name} ended with status {status}: {last}")

    def close(self) -> None:
        if self.gone:
            return
        self.gone = True
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def abandon(self) -> None:
        """End it in the middle of whatever it does."""
        self._process.kill()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close() if kind is None else self.abandon()


def environment(extra: dict[str, str]) -> dict[str, str]:
    """The children import this very mlxrt, wherever it lies."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, **extra}
