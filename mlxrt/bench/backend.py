"""Backends: engines in processes of their own, asked in JSON, one line a question and one an answer.

The first answer of a backend is its `info`, sent when it is ready. This module does not know what is measured.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from ..errors import MlxrtError

PACKAGE = "mlxrt.bench.backends"


class BackendFailed(MlxrtError):
    """A backend could not be started or died."""

    exit_code = 2


class BackendRefused(BackendFailed):
    """A backend understood the question and cannot serve it; it is still running."""


class Backend:
    """One engine process. Its stderr is kept, for `read_log` and for the message that says why it died."""

    def __init__(
        self,
        name: str,
        setting: dict[str, Any],
        *,
        program: str = "",
        env: dict[str, str] | None = None,
        checkout: Path | None = None,
    ):
        """`checkout`: the folder of another mlxrt to run instead of this one."""
        self.name, self.closed = name, False
        self.restart = partial(Backend, name, setting, program=program, env=env, checkout=checkout)
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", program or f"{PACKAGE}.{name.replace('-', '_').replace('.', '_')}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=checkout,
            env=environment(env or {})
            if checkout is None
            else {**os.environ, "PYTHONPATH": str(checkout)} | (env or {}),
            start_new_session=True,  # Ctrl-C is for the parent; a backend ends when its stdin closes
        )
        self.info: dict[str, Any] = {}
        try:
            self.info = self.ask(**setting)
        finally:
            if not self.info:
                self.kill()

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
            raise BackendRefused(f"{self.name}: {reply['refused']}")
        return reply

    def read_log(self) -> list[str]:
        """The lines it has written to stderr so far: that a kernel is off, for example."""
        file = self._stderr.fileno()
        raw = os.pread(file, os.fstat(file).st_size, 0)  # not `read`: the process writes where the file's position is
        return raw.decode(errors="replace").splitlines()

    def _fail(self) -> NoReturn:
        status = self._process.wait()
        last = next(filter(str.strip, reversed(self.read_log())), "nothing on stderr")
        raise BackendFailed(f"{self.name} ended with status {status}: {last}")

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def kill(self) -> None:
        """End the process without waiting for its answer."""
        self._process.kill()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close() if kind is None else self.kill()


def environment(extra: dict[str, str]) -> dict[str, str]:
    """Environment in which a child imports this very mlxrt, wherever it lies."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, **extra}
