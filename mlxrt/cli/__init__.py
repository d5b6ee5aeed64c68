"""The command line: picks the command; everything else is in the command's own file.

Nothing here imports MLX: a wrong flag and `--help` are answered before anything heavy is loaded.
"""

import sys
from importlib import import_module
from types import ModuleType

from ..errors import BadRequest
from .flags import Parser
from .logs import add_log_flags, show_log
from .outcome import guarded

COMMANDS = {
    "generate": "answer one prompt",
    "chat": "talk with a model, turn by turn",
    "pull": "fetch a model into the cache",
    "convert": "write a model in another format",
    "info": "say what a model needs and what this machine has",
    "bench": "measure engines side by side",
    "doctor": "check this machine, and our kernels on it",
    "state": "list, show, verify or remove saved conversations and disk caches",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = sys.argv[1:] if argv is None else argv
    return guarded(lambda: dispatch(given))


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from .. import __version__

        print(f"mlxrt {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        raise BadRequest(f"there is no {what} {name!r} here; commands: {', '.join(COMMANDS)}; see mlxrt --help")
    command: ModuleType = import_module(f".{name}", __name__)
    parser = Parser(prog=f"mlxrt {name}", description=COMMANDS[name])
    command.add_flags(parser)
    add_log_flags(parser)
    try:
        args = parser.parse_args(argv[1:])
    except SystemExit:  # argparse has printed the help; what is wrong comes as BadRequest
        return 0
    show_log(args.verbose, args.quiet)
    return command.run(args)


def overview() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: mlxrt COMMAND ...", "", *lines, "", "mlxrt COMMAND --help lists a command's flags"])
