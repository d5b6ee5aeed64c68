"""`llm`, the command line tool, with a model of extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import MODEL, QUESTION, SCHEMA, URL, check

folder = tempfile.mkdtemp()
MODELS = {"local": MODEL, "other": "no-such-model"}
Path(folder, "extra-openai-models.yaml").write_text(
    "".join(
        f"- model_id: {id}\n  model_name: {name}\n  api_base: {URL}/v1\n  api_key_name: local\n"
        "  supports_schema: true\n  supports_tools: true\n"
        for id, name in MODELS.items()
    )
)
Path(folder, "keys.json").write_text('{"local": "unused-key"}')
schema = Path(folder, "city.json")
schema.write_text(json.dumps(SCHEMA))
LLM = str(Path(sys.executable).parent / "llm")


def run(*arguments: str, error: bool = False) -> str:
    environment = os.environ | {"LLM_USER_PATH": folder}
    done = subprocess.run([LLM, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False)
    if (done.returncode != 0) != error:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-200:]}")
    return done.stderr if error else done.stdout


check("llm, streamed", lambda: "Paris" in run("-m", "local", QUESTION, "-o", "max_tokens", "20"))
check("llm --no-stream", lambda: "Paris" in run("-m", "local", "--no-stream", QUESTION, "-o", "max_tokens", "20"))
check("llm -c (a conversation)", lambda: run("-m", "local", "-c", "And of Italy?", "-o", "max_tokens", "20"))
# A single word would be the id of a schema that `llm` has stored: a field takes its type beside it.
check(
    "llm --schema", lambda: json.loads(run("-m", "local", "--schema", "name str", QUESTION, "-o", "max_tokens", "120"))
)
check(
    "llm --schema, a file",
    lambda: json.loads(run("-m", "local", "--no-stream", "--schema", str(schema), QUESTION))["name"] == "Paris",
)
check("llm -T (a tool is offered)", lambda: run("-m", "local", "-T", "llm_version", QUESTION, "-o", "max_tokens", "20"))
check("llm: an unknown model", lambda: "does not exist" in run("-m", "other", QUESTION, error=True))
