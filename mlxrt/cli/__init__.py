"""The command line: dispatches to one module per command.

Nothing here imports MLX, and a command's module is imported when its name was given: `--help` and a wrong flag are
answered before anything heavy is loaded.
"""

import sys
from importlib import import_module
from types import ModuleType

from ..errors import BadRequest
from .exit_status import run_guarded
from .flags import Parser
from .terminal import add_log_flags, configure_logging

COMMANDS = {
    "generate": "answer one prompt",
    "chat": "chat with a model in the terminal",
    "pull": "download a model into the cache",
    "convert": "write a model in another format",
    "info": "show what a model needs and what this machine has",
    "bench": "measure engines side by side",
    "doctor": "check this machine, and our kernels on it",
    "state": "list, show, verify or remove saved conversations and disk caches",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_guarded(lambda: dispatch(arguments))


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(format_help())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from .. import __version__

        print(f"mlxrt {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        raise BadRequest(f"unknown {what} {name!r}; commands: {', '.join(COMMANDS)}; see mlxrt --help")
    command: ModuleType = import_module(f".{name}", __name__)
    parser = Parser(prog=f"mlxrt {name}", description=COMMANDS[name])
    command.add_flags(parser)
    add_log_flags(parser)
    try:
        args = parser.parse_args(argv[1:])
    except SystemExit:  # --help was printed; errors are BadRequest
        return 0
    configure_logging(args.verbose, args.quiet)
    return command.run(args)


def format_help() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: mlxrt COMMAND ...", "", *lines, "", "mlxrt COMMAND --help lists a command's flags"])
