"""`llm`, the command line tool, with a model of extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import MODEL, QUESTION, URL, check

folder = tempfile.mkdtemp()
Path(folder, "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  api_key_name: local\n  supports_schema: true\n"
)
Path(folder, "keys.json").write_text('{"local": "unused-key"}')
LLM = str(Path(sys.executable).parent / "llm")


def run(*arguments: str) -> str:
    environment = os.environ | {"LLM_USER_PATH": folder}
    return subprocess.run(
        [LLM, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=True
    ).stdout


check("llm, streamed", lambda: "Paris" in run("-m", "local", QUESTION, "-o", "max_tokens", "20"))
check("llm --no-stream", lambda: "Paris" in run("-m", "local", "--no-stream", QUESTION, "-o", "max_tokens", "20"))
check("llm -c (a conversation)", lambda: run("-m", "local", "-c", "And of Italy?", "-o", "max_tokens", "20"))
check("llm --schema", lambda: '"name"' in run("-m", "local", "--schema", "name", QUESTION, "-o", "max_tokens", "60"))
