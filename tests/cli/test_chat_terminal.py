"""`mlxrt chat` through a pseudo terminal: paste, Ctrl-C at each state, history, completion, commands.

The tokenizer has one token per byte, so that the number of prompt tokens tells what the model was given.
"""

import os
import sys
import time

import pexpect
import pytest

pytestmark = pytest.mark.usefixtures("hears_ctrl_c")
LETTER = 64  # every answer is this token again and again
PASTE = "\n".join(f"line {i}: the cat sat on the mat" for i in range(50))
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


def count_tokens(*said: object) -> int:
    """Of a conversation that waits for an answer: questions as text, answers as their lengths."""
    frames = {str: 1 + len("user\n") + 2, int: 1 + len("assistant\n") + 2}
    return sum(frames[type(t)] + (t if isinstance(t, int) else len(t)) for t in said) + 1 + len("assistant\n")


class Terminal:
    def __init__(self, folder, cache):
        flags = ["-n", "6", "--ignore-eos", "--logit-bias", f"{LETTER}=1000"]
        environment = os.environ | {"MLXRT_CACHE": str(cache), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
        command = ["-m", "mlxrt", "chat", "-m", str(folder), *flags]
        self.child = pexpect.spawn(
            sys.executable, command, env=environment, encoding="utf-8", timeout=60, dimensions=(60, 160)
        )
        self.prompt()

    def prompt(self) -> None:
        """Wait until a line can be typed: the editor turns bracketed paste on."""
        self.child.expect_exact("\x1b[?2004h")

    def type(self, text: str) -> None:
        self.child.send(text)

    def ask(self, text: str, *conversation: object) -> None:
        """Type a line that is answered, and look what the model was given."""
        self.type(text + "\r")
        self.child.expect_exact(f"{count_tokens(*conversation)} prompt tokens, ")
        self.prompt()

    def command(self, text: str, line: str) -> None:
        self.type(text + "\r")
        self.child.expect_exact(line)
        self.prompt()

    def leave(self) -> None:
        self.type(CTRL_D)
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert self.child.exitstatus == 0


@pytest.fixture
def terminal(folder, tmp_path):
    opened = []

    def open_terminal() -> Terminal:
        opened.append(Terminal(folder, tmp_path / "cache"))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.child.close(force=True)


def test_a_chat_on_a_terminal(terminal):
    t = terminal()
    t.ask(f"\x1b[200~{PASTE}\x1b[201~", PASTE)
    said: tuple = (PASTE, 6)
    t.type("a line half typed")
    t.command(CTRL_C, "Ctrl-D or /exit leaves the chat")
    t.command(CTRL_C, "Ctrl-D or /exit leaves the chat")  # at an empty line
    t.ask("hello", *said, "hello")
    said += ("hello", 6)
    t.ask('"""two\rlines"""', *said, "two\nlines")
    said += ("two\nlines", 6)
    t.ask("one\x1b\rtwo", *said, "one\ntwo")  # Alt-Enter

    t.command("/undo 2", "2 turns left")
    said = said[:-2]
    t.command("/set max_tok\t4", "max_tokens is 4")
    t.ask("go on", *said, "go on")
    t.ask("/re\t", *said, "go on")
    t.leave()

    again = terminal()
    again.ask(UP + UP, "go on")  # above it stands /retry
    again.leave()


def test_ctrl_c_while_a_model_loads_ends_the_chat(folder):
    config = folder.path / "config.json"
    config.unlink()
    os.mkfifo(config)  # whoever reads it waits
    command = ["-m", "mlxrt", "chat", "-m", str(folder)]
    child = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=60)
    limit = time.monotonic() + 60
    while True:
        try:
            writer = os.open(config, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:  # nobody reads it yet
            assert time.monotonic() < limit and child.isalive()
            time.sleep(0.01)
    child.send(CTRL_C)
    child.expect_exact("mlxrt: interrupted")
    child.expect(pexpect.EOF)
    os.close(writer)
    child.close()
    assert child.exitstatus == 130
