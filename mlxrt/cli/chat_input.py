"""What is typed in a chat: on a terminal with editing, history and completion, or through a pipe.

On a terminal a pasted text is one message, however many lines it has. In both, a line that begins with three quotes
opens a message of several lines, and one that ends with three quotes closes it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadRequest
from .request import decode_utf8
from .terminal import note

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

PROMPT, CONTINUED = "> ", "... "
QUOTES = '"""'
ReadLine = Callable[[str], str | None]  # takes the prompt; None at the end of the input
Complete = Callable[[str], Iterable[tuple[str, int]]]  # the text so far: what it may become, and how much is replaced


def read_message(read_line: ReadLine) -> str | None:
    """The next message; None at the end of the input."""
    line = read_line(PROMPT)
    if line is None or "\n" in line.strip("\n") or not line.lstrip().startswith(QUOTES):
        return line
    lines = [line.strip().removeprefix(QUOTES)]
    while not lines[-1].endswith(QUOTES):
        line = read_line(CONTINUED)
        if line is None:
            raise BadRequest(f"the input ended inside {QUOTES}; nothing was asked")
        lines.append(line.rstrip())
    return "\n".join(lines).removesuffix(QUOTES).strip("\n")


def read_pipe_line(prompt: str) -> str | None:
    raw = sys.stdin.buffer.readline()
    return decode_utf8(raw, "stdin") if raw else None


def open_terminal(complete: Complete, history: Path | None) -> ReadLine:
    """A reader of lines; it raises KeyboardInterrupt on Ctrl-C, and the line is gone."""
    session = make_session(complete, history)

    def read_line(prompt: str) -> str | None:
        try:
            return session.prompt(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as bad:
            raise BadRequest(f"the line is not UTF-8 ({bad.reason}); type it again") from None

    return read_line


def make_session(complete: Complete, history: Path | None) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    def complete_words(self, document, event) -> Iterator[Completion]:
        for word, replaced in complete(document.text_before_cursor):
            yield Completion(word, start_position=-replaced)

    words = type("Words", (Completer,), {"get_completions": complete_words})
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=open_history(history),
        completer=words(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        key_bindings=keys,
        prompt_continuation=CONTINUED,
        output=create_output(always_prefer_tty=True),  # stdout may be a file that gets the answers
    )


def open_history(path: Path | None) -> "History":
    """What was typed in earlier chats, in a file that only its owner can read. Without one, this chat's alone."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                note(f"{path}: {error.strerror}; this line is not in the history of the next chat")

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.read_bytes()
    except OSError as error:
        note(f"{path}: {error.strerror}; the history of this chat is not kept")
        return InMemoryHistory()
    return History(str(path))
