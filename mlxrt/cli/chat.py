"""`mlxrt chat`: a conversation from a terminal or a pipe (one line, one turn), and its slash commands."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadRequest, MlxrtError
from .exit_status import print_error
from .flags import Parser, add_engine_flags, add_model_flag, add_sampling_flags, engine_config, sampling_options
from .request import add_template_flags, decode_utf8, merge_defaults, open_model, read_tools, require_template
from .terminal import format_bytes, note

if TYPE_CHECKING:
    from ..engine.engine import Engine

PROMPT = "> "
HELP = """/undo [N]   remove the last question and answer, or the last N
/clear      remove everything but the system message
/save FILE  save the conversation and its KV cache
/load FILE  continue a saved conversation
/stats      show what the engine holds and has done
/exit       leave; so does the end of the input"""


def add_flags(parser: Parser) -> None:
    add_model_flag(parser)
    add_template_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    sampling, config = sampling_options(args), engine_config(args)
    if sampling.get("logprobs"):
        raise BadRequest("--logprobs are shown by `mlxrt generate --json`, not in a chat")
    extra = {"tools": read_tools(args.tools), "enable_thinking": args.enable_thinking}
    model = open_model(args, config)
    require_template(model)
    with model.load() as engine:
        options = merge_defaults(dict(engine.source.generation), sampling)
        options |= {name: value for name, value in extra.items() if value is not None}
        return run_chat(Chat(engine, args.system, options))


def run_chat(chat: "Chat") -> int:
    """Run turns until the end of the input. A turn that fails is reported and the chat goes on.

    With a pipe the exit code is that of the last failure, since nobody reads the lines."""
    failed, interactive = 0, sys.stdin.isatty()
    if interactive:
        note(f"{chat.engine.source.name}; /help lists the commands")
        import_line_editing()
    while True:
        try:
            line = read_line(interactive)
            if line is None or not chat.handle(line.strip()):
                return 0 if interactive else failed
        except MlxrtError as error:
            print_error(str(error))
            failed = error.exit_code


def import_line_editing() -> None:
    """Importing readline is what gives input() its editing and history; not every Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401


def read_line(interactive: bool) -> str | None:
    """The next line; None at the end of the input."""
    if not interactive:
        raw = sys.stdin.buffer.readline()
        return decode_utf8(raw, "stdin") if raw else None
    try:
        return input(PROMPT)
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as bad:
        raise BadRequest(f"the line is not UTF-8 ({bad.reason}); type it again") from None


class Chat:
    """One session and the slash commands that work on it."""

    def __init__(self, engine: "Engine", system: str | None, options: dict[str, Any]):
        self.engine, self.system, self.options = engine, system, options
        self.session = engine.session(system, **options)

    def handle(self, line: str) -> bool:
        """Answer a line or run its command; False on /exit."""
        if line in ("/exit", "/quit"):
            return False
        if line.startswith("/"):
            self.command(*[*line.split(maxsplit=1), ""][:2])
        elif line:
            self.answer(line)
        return True

    def answer(self, text: str) -> None:
        from .output import StreamPrinter, print_timings

        printer, reply = StreamPrinter(interrupt_early=True), self.session.say(text)
        try:
            finished = printer.consume(reply)
        finally:
            reply.close()
            printer.end_line()
        if finished:
            print_timings(printer.completion(), self.engine.stats().peak_memory)
        else:
            note(f"stopped after {len(printer.events)} tokens; this question and its answer are not kept")

    def command(self, name: str, rest: str) -> None:
        commands = {
            "/undo": self.undo, "/clear": self.clear, "/save": self.save, "/load": self.load,
            "/stats": self.stats, "/help": self.help,
        }  # fmt: skip
        if name not in commands:
            raise BadRequest(f"there is no command {name}; commands: {', '.join(commands)}, /exit")
        commands[name](rest.strip())

    def undo(self, rest: str) -> None:
        if rest and not rest.isdecimal():
            raise BadRequest(f"/undo takes a number of turns, not {rest!r}")
        self.session.rewind(int(rest[:9] or 1))
        note(f"{self.turn_count()} turns are left")

    def clear(self, rest: str) -> None:
        refuse_argument(rest, "/clear")
        self.session = self.engine.session(self.system, **self.options)
        note("the conversation is empty")

    def save(self, rest: str) -> None:
        path = parse_path(rest, "/save")
        self.session.save(path)
        note(f"{path}: {self.turn_count()} turns, {format_bytes(path.stat().st_size)}")

    def load(self, rest: str) -> None:
        from ..engine.session import Session

        path = parse_path(rest, "/load")
        self.session = Session.restore(self.engine, path, **self.options)
        note(f"{path}: {self.turn_count()} turns, {len(self.session.tokens)} tokens")

    def stats(self, rest: str) -> None:
        refuse_argument(rest, "/stats")
        s, session = self.engine.stats(), self.session
        note(f"{self.turn_count()} turns, {len(session.tokens)} of {self.engine.context} tokens of context")
        note(f"KV cache: {format_bytes(s.kv_bytes)} held, {format_bytes(s.kv_limit)} at most")
        note(f"prefix cache: {s.hits} hits, {s.misses} misses, {s.reused_tokens} tokens reused, {s.evictions} evicted")
        note(f"{s.positions} tokens computed; peak memory {format_bytes(s.peak_memory)}")

    def help(self, rest: str) -> None:
        for line in HELP.splitlines():
            note(line)

    def turn_count(self) -> int:
        return len(self.session.turns) - 1


def refuse_argument(rest: str, command: str) -> None:
    if rest:
        raise BadRequest(f"{command} takes nothing after it, not {rest!r}")


def parse_path(rest: str, command: str) -> Path:
    if not rest:
        raise BadRequest(f"{command} needs the name of a file")
    return Path(rest).expanduser()
