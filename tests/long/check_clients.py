"""The calls of real clients against `mlxrt serve` with SmolLM2: a table of what works.

    python -m tests.long.check_clients --folder build/clients [--only litellm llm]

Each client is installed into an environment of its own below the folder: they bring a hundred packages.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .load_server import Server

HERE = Path(__file__).parent / "clients"
TIMEOUT_S = 1800  # of one client
FLAGS = ("--tool-parser", "hermes", "--no-dequantise")


@dataclass(frozen=True)
class Client:
    name: str
    program: str
    packages: tuple[str, ...]

    def prepare(self, folder: Path) -> list[str]:
        """The command that runs its calls."""
        if self.program.endswith(".mjs"):
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["npm", "install", "--no-fund", "--no-audit", "--silent", *self.packages], cwd=folder, check=True
            )
            copied = folder / self.program
            copied.write_text((HERE / self.program).read_text())
            return ["node", str(copied)]
        python = folder / "bin" / "python"
        if not python.exists():
            venv.create(folder, with_pip=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *self.packages], check=True)
        return [str(python), str(HERE / self.program)]


CLIENTS = [
    Client("openai", "openai_calls.py", ("openai",)),
    Client("anthropic", "anthropic_calls.py", ("anthropic",)),
    Client("ollama", "ollama_calls.py", ("ollama",)),
    Client("litellm", "litellm_calls.py", ("litellm", "mcp")),
    Client("langchain", "langchain_calls.py", ("langchain-openai", "langchain-anthropic", "langchain-ollama")),
    Client("llm", "llm_calls.py", ("llm",)),
    Client("aider", "aider_calls.py", ("aider-chat",)),
    Client("ai-sdk", "ai_sdk_calls.mjs", ("ai", "@ai-sdk/openai-compatible")),
]


def run_calls(command: list[str], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What a client's program prints of each call, as it comes."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        end = threading.Timer(TIMEOUT_S, child.kill)
        end.start()
        assert child.stdout is not None
        count = 0
        for line in child.stdout:
            if line.startswith('{"call"'):
                count += 1
                yield json.loads(line)
        code = child.wait()
        end.cancel()
        if code or not count:
            errors.seek(0)
            yield {"call": "its program", "ok": False, "note": f"exit code {code}: {errors.read()[-300:]}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/clients"))
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS])
    args = parser.parse_args()
    chosen = [client for client in CLIENTS if args.only is None or client.name in args.only]
    commands = {client.name: client.prepare((args.folder / client.name).absolute()) for client in chosen}
    server = Server("smollm2", str(args.folder.absolute() / "prefixes"), FLAGS)
    server.start()
    failed = 0
    environment = os.environ | {"MLXRT_URL": f"http://127.0.0.1:{server.port}", "MLXRT_MODEL": "m"}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices
    print("| client | call | |\n|---|---|---|")
    try:
        for name, command in commands.items():
            for result in run_calls(command, environment):
                failed += not result["ok"]
                says = "yes" if result["ok"] else "NO: " + result["note"]
                print(f"| {name} | {result['call']} | {says} |", flush=True)
    finally:
        server.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
