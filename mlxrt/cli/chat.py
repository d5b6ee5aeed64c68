"""`mlxrt chat`: a conversation from a terminal or a pipe (one line, one turn), and its slash commands."""

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.overflow import OVERFLOW
from ..engine.request import SamplingParams
from ..errors import BadRequest, ContextOverflow, MlxrtError
from .chat_input import open_terminal, read_message, read_pipe_line
from .chat_tools import ToolRunner, load_functions
from .exit_status import print_error
from .flags import (
    Parser,
    add_engine_flags,
    add_model_flag,
    add_sampling_flags,
    engine_config,
    parse_sampling_option,
    sampling_options,
)
from .request import add_template_flags, merge_defaults, open_model, read_template_flags, require_template
from .terminal import format_bytes, note

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.request import Completion
    from ..engine.session import Session

log = logging.getLogger("mlxrt")

MAX_TOKENS = 2048  # of an answer, unless -n says otherwise: who reads it can stop it
HELP = """/retry            answer the last question again
/set NAME VALUE   set a sampling option, such as temperature 0.7; alone it lists them
/tools FILE.py    let the model call the functions of a file, each after your yes; /tools off ends it
/system TEXT      begin a new conversation with this system message; alone it shows the present one
/context          show how full the context is, and the summary of turns that are gone
/undo [N]         remove the last question and answer, or the last N
/clear            remove everything but the system message
/save FILE        save the conversation and its KV cache
/load FILE        continue a saved conversation
/stats            show what the engine holds and has done
/exit             leave; so do /bye and Ctrl-D
Ctrl-C stops an answer, which is kept as far as it came, or drops the line that is typed.
A pasted text is one message; Alt-Enter begins a new line, and so do three quotes at both ends of the message."""
STOPPED = "stopped before the answer began; /retry asks again"
MAX_ROUNDS = 16  # of calls and results for one question
EXITS = ("/exit", "/quit", "/bye")
COMMAND = re.compile(r"/[a-z?]+")  # a path such as /etc/hosts begins a question


def add_flags(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    add_model_flag(parser)
    add_chat_flags(parser)


def add_chat_flags(parser: Parser) -> None:
    add_template_flags(parser)
    parser.add_argument(
        "--on-overflow", choices=OVERFLOW, default="error",
        help="when the context is full: error, drop-oldest turns, or summarize them (default: error)",
    )  # fmt: skip
    parser.add_argument(
        "--no-history", action="store_true", help="keep what is typed out of the history of later chats"
    )
    add_sampling_flags(parser, MAX_TOKENS)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.name is not None and args.model is not None:
        raise BadRequest(f"two models are given, {args.name} and --model {args.model}; give one")
    args.model = args.name if args.model is None else args.model
    sampling, config = sampling_options(args), engine_config(args)
    if sampling.get("logprobs"):
        raise BadRequest("--logprobs are shown by `mlxrt generate --json`, not in a chat")
    extra = read_template_flags(args)
    model = open_model(args, config)
    require_template(model)
    with model.load() as engine:
        options = {"max_tokens": MAX_TOKENS} | merge_defaults(dict(engine.source.generation), sampling)
        chat = Chat(engine, args.system, options | extra, args.on_overflow, not args.hide_thinking)
        return run_terminal(chat, None if args.no_history else history_path()) if sys.stdin.isatty() else run_pipe(chat)


def history_path() -> Path:
    from ..weights.source.cache_dir import cache_root

    return cache_root() / "chat_history"


def run_pipe(chat: "Chat") -> int:
    """Each line is a turn. The exit code is that of the last failure, since nobody reads the lines."""
    failed = 0
    while True:
        try:
            text = read_message(read_pipe_line)
            if text is None or not chat.handle(text):
                return failed
        except MlxrtError as error:
            print_error(describe_error(error))
            failed = error.exit_code


def run_terminal(chat: "Chat", history: Path | None) -> int:
    """Turns until /exit or Ctrl-D. Neither an error nor Ctrl-C loses the conversation."""
    note(f"{chat.engine.source.name}; /help lists the commands")
    read_line = open_terminal(chat.complete, history)
    confirm = open_terminal(lambda text: (), None)  # a yes is no message: it stays out of the history
    chat.tools.confirm = lambda question: (confirm(question) or "").strip().lower() in ("y", "yes")
    while True:
        typing = True
        try:
            text = read_message(read_line)
            typing = False
            if text is None or not chat.handle(text):
                return 0
        except KeyboardInterrupt:
            note("Ctrl-D or /exit leaves the chat" if typing else STOPPED)
        except MlxrtError as error:
            print_error(describe_error(error))


def describe_error(error: MlxrtError) -> str:
    if not isinstance(error, ContextOverflow):
        return str(error)
    return f"{error}; /undo or /clear makes room, and a chat with --on-overflow drop-oldest goes on"


class Chat:
    """One session and the slash commands that work on it."""

    def __init__(
        self,
        engine: "Engine",
        system: str | None,
        options: dict[str, Any],
        on_overflow: str = "error",
        show_thinking: bool = True,
    ):
        self.engine, self.system, self.options = engine, system, options
        self.on_overflow, self.show_thinking, self.tools = on_overflow, show_thinking, ToolRunner()
        self.session = engine.session(system, on_overflow, **options)
        self.use_functions([f for f in options.get("tools") or () if callable(f)])
        self.question: str | None = None  # the last one, answered or not
        self.answered_with: dict[str, Any] | None = None  # the options of the last answer that was not stopped
        self.commands = {
            "/retry": self.retry, "/set": self.set, "/undo": self.undo, "/clear": self.clear, "/save": self.save,
            "/load": self.load, "/tools": self.set_tools, "/system": self.set_system, "/context": self.context,
            "/stats": self.stats, "/help": self.help, "/?": self.help,
        }  # fmt: skip

    def handle(self, text: str) -> bool:
        """Answer a message or run a command; False on /exit."""
        line = text.strip()
        if line in EXITS:
            return False
        name, _, rest = line.partition(" ")
        if "\n" not in line and COMMAND.fullmatch(name):
            self.run_command(name, rest.strip())
        elif line:
            self.question = text.strip("\n") if "\n" in line else line
            self.answer(self.session, self.question)
        return True

    def answer(self, session: "Session", question: str) -> None:
        """Print an answer, and run the tools it calls until it calls no more."""
        content: str | list[dict[str, Any]] = question
        for _ in range(MAX_ROUNDS):
            done = self.print_answer(session, content)
            if not done.tool_calls or done.finish_reason == "cancelled":
                return
            content = [self.tools.answer(call) for call in done.tool_calls]
        note(f"the model called tools {MAX_ROUNDS} times in a row; ask it to go on")

    def print_answer(self, session: "Session", content: "str | list[dict[str, Any]]") -> "Completion":
        """Print an answer; Ctrl-C stops it, and what came is kept. The chat goes on with this session."""
        from .output import StreamPrinter

        reply = session.say(content)
        printer = StreamPrinter(stop=lambda: reply.stop(wait=False), show_thinking=self.show_thinking)
        try:
            printer.consume(reply)
        finally:
            reply.close()
            printer.end_line()
        done = printer.completion()
        if done.tokens:
            self.session = session
            self.answered_with = dict(self.options) if done.finish_reason != "cancelled" else None
            self.describe(done)
        else:
            note(STOPPED)
        return done

    def run_command(self, name: str, rest: str) -> None:
        if name not in self.commands:
            near = get_close_matches(name, [*self.commands, *EXITS], n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; commands: {', '.join(self.commands)}, /exit"
            raise BadRequest(f"there is no command {name}{hint}")
        self.commands[name](rest)

    def retry(self, rest: str) -> None:
        refuse_argument(rest, "/retry")
        if self.question is None:
            raise BadRequest("there is no question to ask again")
        other = self.session.fork()  # an answer that is stopped before it begins leaves the last one
        asked = find_questions(other)
        if asked and asked[-1][1] == self.question:
            other.rewind(len(other.turns) - asked[-1][0])
            drawn = self.options.get("temperature") and self.options.get("seed") is None
            if self.options == self.answered_with and not drawn:
                note("the answer will be the same: /set temperature 0.7, or another seed, to change it")
        self.answer(other, self.question)

    def set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not rest:
            for option in fields(SamplingParams):
                if option.name != "logprobs":
                    note(f"{option.name:<18} {self.options.get(option.name, getattr(SamplingParams(), option.name))}")
            return
        if not value.strip():
            raise BadRequest("/set takes a name and a value, such as /set temperature 0.7")
        name, parsed = parse_sampling_option(name, value.strip())
        if name == "logprobs":
            raise BadRequest("logprobs are shown by `mlxrt generate --json`, not in a chat")
        self.options[name] = self.session.options[name] = parsed
        note(f"{name} is {parsed}")

    def complete(self, text: str) -> Iterator[tuple[str, int]]:
        """What a line may become: commands, options after /set, files after /save and /load."""
        name, space, rest = text.partition(" ")
        if not space:
            names = [n for n in (*self.commands, *EXITS) if n != "/?"]
            yield from ((n, len(text)) for n in sorted(names) if text.startswith("/") and n.startswith(text))
        elif name == "/set" and " " not in rest:
            names = [option.name for option in fields(SamplingParams) if option.name != "logprobs"]
            yield from ((f"{n} ", len(rest)) for n in names if n.startswith(rest))
        elif name in ("/save", "/load", "/tools"):
            folder, part = os.path.split(rest)
            yield from ((found, len(part)) for found in list_files(Path(folder or ".").expanduser(), part))

    def undo(self, rest: str) -> None:
        if rest and not rest.isdecimal():
            raise BadRequest(f"/undo takes a number of turns, not {rest!r}")
        count, asked = int(rest[:9] or 1), find_questions(self.session)
        self.session.rewind(len(self.session.turns) - asked[-count][0] if 0 < count <= len(asked) else count)
        note(f"{self.turns()} left")

    def clear(self, rest: str) -> None:
        refuse_argument(rest, "/clear")
        self.session = self.engine.session(self.system, self.on_overflow, **self.options)
        note("the conversation is empty")

    def set_system(self, rest: str) -> None:
        if rest:
            self.system = rest
            self.clear("")
        note(f"system message: {self.system}" if self.system else "there is no system message; /system TEXT gives one")

    def save(self, rest: str) -> None:
        path = parse_path(rest, "/save")
        self.session.save(path)
        note(f"{path}: {self.turns()}, {format_bytes(path.stat().st_size)}")

    def load(self, rest: str) -> None:
        from ..engine.session import Session

        path = parse_path(rest, "/load")
        self.session = Session.restore(self.engine, path, on_overflow=self.on_overflow, **self.options)
        note(f"{path}: {self.turns()}, {len(self.session.tokens)} tokens")

    def set_tools(self, rest: str) -> None:
        if rest == "off":
            self.use_functions([])
        elif rest:
            self.use_functions(load_functions(Path(rest).expanduser()))
        names = ", ".join(self.tools.functions)
        note(f"tools: {names}; each call asks first" if names else "there are no tools; /tools FILE.py gives some")

    def use_functions(self, functions: "list[Callable[..., Any]]") -> None:
        self.tools.functions = {function.__name__: function for function in functions}
        if functions or "tools" in self.options:
            self.options["tools"] = self.session.options["tools"] = (
                tuple(functions) or tuple(t for t in self.options.get("tools") or () if not callable(t)) or None
            )

    def context(self, rest: str) -> None:
        refuse_argument(rest, "/context")
        used, session = len(self.session.tokens), self.session
        note(f"{self.turns()}, {used} of {self.engine.context} tokens; when it is full: {self.on_overflow}")
        if session.summary:
            note(f"summary of the turns before: {session.summary}")

    def stats(self, rest: str) -> None:
        refuse_argument(rest, "/stats")
        s, session = self.engine.stats(), self.session
        note(f"{self.turns()}, {len(session.tokens)} of {self.engine.context} tokens of context")
        note(f"KV cache: {format_bytes(s.kv_bytes)} held, {format_bytes(s.kv_limit)} at most")
        note(f"prefix cache: {s.hits} hits, {s.misses} misses, {s.reused_tokens} tokens reused, {s.evictions} evicted")
        note(f"{s.positions} tokens computed; peak memory {format_bytes(s.peak_memory)}")

    def help(self, rest: str) -> None:
        for line in HELP.splitlines():
            note(line)

    def turns(self) -> str:
        count = len(find_questions(self.session))
        return "1 turn" if count == 1 else f"{count} turns"

    def describe(self, done: "Completion") -> None:
        """One short line after an answer: what it took, and why it ended where the model did not end it."""
        from .output import describe_end

        t, limit = done.timings, self.options["max_tokens"]
        speed = f" at {t.decode_tps:.1f} tok/s" if t.decode_tps else ""
        log.info(f"{t.prompt_tokens} prompt tokens, {t.cached_tokens} cached | {t.generated_tokens} generated{speed}")
        if done.finish_reason == "length":
            full = len(done.tokens) < limit
            remedy = "/undo or /clear makes room" if full else "/set max_tokens raises it"
            note(f"the answer {describe_end(done, limit)}; {remedy}")
        elif done.finish_reason == "cancelled":
            note("stopped; the answer is kept as far as it came")


def find_questions(session: "Session") -> list[tuple[int, str]]:
    """The number of the turn with which each question was answered first, and the question.

    An answer that calls tools is followed by turns that begin with their results."""
    found, before = [], session.turns[0]
    for i, turn in enumerate(session.turns[1:], 1):
        message = turn.messages[len(before.messages)]
        if message["role"] != "tool":
            found.append((i, message.get("content") or ""))
        before = turn
    return found


def refuse_argument(rest: str, command: str) -> None:
    if rest:
        raise BadRequest(f"{command} takes nothing after it, not {rest!r}")


def parse_path(rest: str, command: str) -> Path:
    if not rest:
        raise BadRequest(f"{command} needs the name of a file")
    return Path(rest).expanduser()


def list_files(folder: Path, part: str) -> list[str]:
    try:
        found = [f"{f.name}/" if f.is_dir() else f.name for f in folder.iterdir() if f.name.startswith(part)]
    except OSError:
        return []
    return sorted(name for name in found if part or not name.startswith("."))
