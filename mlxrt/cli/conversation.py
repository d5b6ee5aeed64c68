"""A chat's turns and its slash commands. Knows sessions and how answers are shown, not where lines come from."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.session import Session
from ..errors import BadRequest
from .answer import Answer, report
from .terminal import amount, note

if TYPE_CHECKING:
    from ..engine.engine import Engine

HELP = """/undo [N]   forget the last question and answer, or the last N
/clear      forget everything but the system message
/save FILE  the conversation and what was computed for it
/load FILE  go on from there
/stats      what the engine holds and has done
/exit       leave; so does the end of the input"""


class Conversation:
    def __init__(self, engine: "Engine", system: str | None, options: dict[str, Any]):
        self.engine, self.system, self.options = engine, system, options
        self.session = engine.session(system, **options)

    def take(self, line: str) -> bool:
        """Answer a line or do what it commands; False when it asks to leave."""
        if line in ("/exit", "/quit"):
            return False
        if line.startswith("/"):
            self.command(*[*line.split(maxsplit=1), ""][:2])
        elif line:
            self.answer(line)
        return True

    def answer(self, text: str) -> None:
        answer, reply = Answer(patient=True), self.session.say(text)
        try:
            whole = answer.follow(reply)
        finally:
            reply.close()
            answer.end_line()
        if whole:
            report(answer.completion(), self.engine.stats().peak_memory)
        else:
            note(f"stopped after {len(answer.events)} tokens; this question and its answer are not kept")

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
        note(f"{self.turns()} turns are left")

    def clear(self, rest: str) -> None:
        refuse(rest, "/clear")
        self.session = self.engine.session(self.system, **self.options)
        note("everything is forgotten")

    def save(self, rest: str) -> None:
        path = named(rest, "/save")
        self.session.save(path)
        note(f"{path}: {self.turns()} turns, {amount(path.stat().st_size)}")

    def load(self, rest: str) -> None:
        path = named(rest, "/load")
        self.session = Session.restore(self.engine, path, **self.options)
        note(f"{path}: {self.turns()} turns, {len(self.session.tokens)} tokens")

    def stats(self, rest: str) -> None:
        refuse(rest, "/stats")
        s, session = self.engine.stats(), self.session
        note(f"{self.turns()} turns, {len(session.tokens)} of {self.engine.context} tokens of context")
        note(f"keys and values: {amount(s.kv_bytes)} held, {amount(s.kv_limit)} at most")
        note(f"prefix cache: {s.hits} hits, {s.misses} misses, {s.reused_tokens} tokens reused, {s.evictions} evicted")
        note(f"{s.positions} tokens computed; peak memory {amount(s.peak_memory)}")

    def help(self, rest: str) -> None:
        for line in HELP.splitlines():
            note(line)

    def turns(self) -> int:
        return len(self.session.turns) - 1


def refuse(rest: str, command: str) -> None:
    if rest:
        raise BadRequest(f"{command} takes nothing after it, not {rest!r}")


def named(rest: str, command: str) -> Path:
    if not rest:
        raise BadRequest(f"{command} needs the name of a file")
    return Path(rest).expanduser()
