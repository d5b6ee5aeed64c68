"""The command line: dispatches to one module per command.

Nothing here imports MLX, and a command's module is imported when its name was given: `--help` and a wrong flag are
answered before anything heavy is loaded. The rest is imported where Ctrl-C is understood already.
"""

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from .. import _interrupt

COMMANDS = {
    "generate": "answer one prompt",
    "chat": "chat with a model in the terminal",
    "run": "chat with a model, or answer the prompt that follows its name",
    "serve": "serve models over HTTP: OpenAI, Anthropic and Ollama protocols, a web page",
    "pull": "download a model into the cache",
    "ls": "list the models that were downloaded",
    "rm": "delete downloaded models",
    "convert": "write a model in another format",
    "info": "show what a model needs and what this machine has",
    "bench": "measure engines side by side",
    "doctor": "check this machine, and our kernels on it",
    "state": "list, show, verify or remove saved conversations and disk caches",
}


OTHER_NAMES = {"list": "ls", "remove": "rm"}
WORDS = ("generate", "chat", "run")  # words and flags in any order
EXAMPLES = {
    "generate": """examples:
  mlxrt generate "What is the capital of France?"
  git diff | mlxrt generate -p - --system "Write a commit message." --temperature 0.3
  mlxrt generate -m model.gguf --raw -n 50 --json "Once upon a time"
  mlxrt generate --prompts questions.jsonl --output answers.jsonl""",
    "chat": """examples:
  mlxrt chat
  mlxrt chat model.gguf --system "Be brief." --temperature 0.7""",
    "run": """examples:
  mlxrt run model.gguf "What is the capital of France?"
  mlxrt run smollm2""",
    "pull": """examples:
  mlxrt pull smollm2
  mlxrt pull owner/name:Q4_K_M""",
    "convert": """examples:
  mlxrt convert model.gguf folder --format mlx
  mlxrt convert owner/name folder --format mlx --bits 8
  mlxrt convert owner/name model.gguf --type q4_k_m""",
    "info": """examples:
  mlxrt info smollm2
  mlxrt info shape:gemma4-31b""",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        _interrupt.raise_again()
        from .exit_status import run_guarded
    except KeyboardInterrupt:
        print("mlxrt: interrupted", file=sys.stderr)
        return 130
    return run_guarded(lambda: dispatch(arguments))


def dispatch(argv: list[str]) -> int:
    from ..errors import BadRequest
    from .flags import Parser
    from .terminal import add_log_flags, configure_logging

    if "_ARGCOMPLETE" in os.environ:
        complete_words()
    if argv[:1] == ["help"] and len(argv) > 1:
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(format_help())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from .. import __version__

        print(f"mlxrt {__version__}")
        return 0
    name = OTHER_NAMES.get(argv[0], argv[0])
    if name in ("-q", "-v", "--quiet", "--verbose"):
        raise BadRequest(f"{name} goes after the command: mlxrt generate {name} ...")
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}; see mlxrt --help"
        raise BadRequest(f"unknown {what} {name!r}; {hint}")
    command: ModuleType = import_module(f".{name}", __name__)
    parser = Parser(prog=f"mlxrt {name}", description=COMMANDS[name], epilog=EXAMPLES.get(name))
    command.add_flags(parser)
    add_log_flags(parser)
    try:
        args = (parser.parse_intermixed_args if name in WORDS else parser.parse_args)(argv[1:])
    except SystemExit:  # --help was printed; errors are BadRequest
        return 0
    configure_logging(args.verbose, args.quiet)
    return command.run(args)


def complete_words() -> None:
    """Answer a shell that wants to complete a line, and end; nothing without argcomplete, which registers it."""
    try:
        import argcomplete
    except ImportError:
        return
    from .flags import Parser
    from .terminal import add_log_flags

    parser = Parser(prog="mlxrt")
    commands = parser.add_subparsers()
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        import_module(f".{name}", __name__).add_flags(command)
        add_log_flags(command)
    argcomplete.autocomplete(parser)


def format_help() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: mlxrt COMMAND ...", "", *lines, "", "mlxrt COMMAND --help lists a command's flags"])
