"""aider: one message, no repository."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import MODEL, QUESTION, URL, check

AIDER = str(Path(sys.executable).parent / "aider")


def run(*arguments: str) -> str:
    environment = os.environ | {
        "OPENAI_API_BASE": f"{URL}/v1",
        "OPENAI_API_KEY": "unused-key",
        "HOME": tempfile.mkdtemp(),
    }
    fixed = [
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--analytics-disable",
        "--no-show-model-warnings",
        "--no-pretty",
    ]
    command = [AIDER, "--model", f"openai/{MODEL}", *fixed, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500, check=False
        )
    return done.stdout + done.stderr


check("aider --message, streamed", lambda: "Paris" in run("--chat-mode", "ask", "--message", QUESTION))
check("aider --no-stream", lambda: "Paris" in run("--chat-mode", "ask", "--no-stream", "--message", QUESTION))
