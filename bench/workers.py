"""Sides: engines in processes of their own, asked in JSON, one line a question and one an answer.

Knows nothing of what is measured.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from mlxrt.errors import MlxrtError

ROOT = Path(__file__).resolve().parent.parent


class Side:
    """One running engine. What it writes to stderr is kept, for the line that says why it died."""

    def __init__(self, name: str, *args: str, env: dict[str, str] | None = None):
        self.name = name
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  as long as the side
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.sides.{name}", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        line = self._process.stdout.readline()
        return json.loads(line) if line else self._fail()

    def _fail(self) -> None:
        status = self._process.wait()
        self._said.seek(0)
        last = (self._said.read().strip().splitlines() or ["it said nothing"])[-1]
        raise MlxrtError(f"bench side {self.name} ended with status {status}: {last}")

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()  # a side ends when its questions end
        self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self.close()
