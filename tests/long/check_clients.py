"""The calls of real clients against `mlxrt serve` with SmolLM2: a table of what works.

    python -m tests.long.check_clients --folder build/clients [--only litellm llm]

Each client is installed into an environment of its own below the folder: they bring a hundred packages.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from .load_server import Server

HERE = Path(__file__).parent / "clients"
TIMEOUT_S = 900


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
    Client("litellm", "litellm_calls.py", ("litellm", "mcp")),
    Client("langchain", "langchain_calls.py", ("langchain-openai", "langchain-anthropic", "langchain-ollama")),
    Client("llm", "llm_calls.py", ("llm",)),
    Client("aider", "aider_calls.py", ("aider-chat",)),
    Client("ai-sdk", "ai_sdk_calls.mjs", ("ai", "@ai-sdk/openai-compatible")),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/clients"))
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS])
    args = parser.parse_args()
    chosen = [client for client in CLIENTS if args.only is None or client.name in args.only]
    commands = {client.name: client.prepare((args.folder / client.name).absolute()) for client in chosen}
    server = Server("smollm2", str(args.folder.absolute() / "prefixes"), ("--tool-parser", "hermes"))
    server.start()
    failed = 0
    environment = os.environ | {"MLXRT_URL": f"http://127.0.0.1:{server.port}", "MLXRT_MODEL": "m"}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices
    print("| client | call | |\n|---|---|---|")
    try:
        for name, command in commands.items():
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"call"')]
            if done.returncode or not results:
                results.append({"call": "its program", "ok": False, "note": done.stderr[-300:]})
            for result in results:
                failed += not result["ok"]
                print(
                    f"| {name} | {result['call']} | {'yes' if result['ok'] else 'NO: ' + result['note']} |", flush=True
                )
    finally:
        server.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
