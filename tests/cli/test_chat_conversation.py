"""Long conversations, tools and Ctrl-C in `mlxrt chat`, through a pseudo terminal and a model that writes as told."""

import json
import os
import sys
import time
from pathlib import Path

import pexpect
import pytest

from tests.engine.test_reasoning import FAMILIES, make_tokenizer

pytestmark = pytest.mark.usefixtures("hears_ctrl_c")
ROOT = Path(__file__).parents[2]
CTRL_C, CTRL_D = "\x03", "\x04"
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail():
    """Fail."""
    raise ValueError("it is broken")
'''
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


class Terminal:
    def __init__(self, folder: Path, answers: list[str], on_overflow="error", context=2048, max_tokens=400, chunk=None):
        self.folder = folder
        make_tokenizer(folder, *FAMILIES["qwen3"])
        settings = {
            "tokenizer": str(folder), "answers": answers, "on_overflow": on_overflow, "context": context,
            "max_tokens": max_tokens, "chunk": chunk,
        }  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings))
        environment = os.environ | {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "NO_COLOR": "1"}
        command = ["-m", "tests.support.scripted_chat", str(folder / "settings.json")]
        self.child = pexpect.spawn(
            sys.executable, command, env=environment, encoding="utf-8", timeout=120, dimensions=(60, 200), cwd=ROOT
        )
        self.wait()

    def wait(self) -> str:
        """Until a line can be typed; what was shown before it."""
        self.child.expect_exact("\x1b[?2004h")
        return self.child.before

    def send(self, text: str) -> str:
        self.child.send(text + "\r")
        return self.wait()

    def hold(self, at: str) -> None:
        """Let answers wait inside a step after so many tokens, or in their prompt."""
        (self.folder / "hold").write_text(at)

    def interrupt(self, presses: int) -> None:
        """Press Ctrl-C while an answer waits, and let it go on."""
        self.wait_for_held("0")
        for n in range(1, presses + 1):
            self.child.send(CTRL_C)
            self.wait_for_held(str(n))
        (self.folder / "held").unlink()
        (self.folder / "hold").unlink()

    def wait_for_held(self, text: str) -> None:
        held, limit = self.folder / "held", time.monotonic() + 120
        while not held.exists() or held.read_text() != text:
            assert time.monotonic() < limit and self.child.isalive()
            time.sleep(0.01)

    def leave(self) -> None:
        self.child.send(CTRL_D)
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert self.child.exitstatus == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop-oldest", "summarize"])
def test_forty_turns_in_a_small_context(policy, tmp_path):
    answers = [f"<think>\nHm {i}.\n</think>\n\nAnswer {i}." for i in range(40)]
    t = Terminal(tmp_path, answers, policy, context=512, max_tokens=60)
    shown = [t.send(f"This is question number {i}.") for i in range(40)]
    for i, text in enumerate(shown):
        assert f"Answer {i}." in text and f"Hm {i}." in text and "mlxrt: " not in text
    assert any("to fit the context" in text for text in shown)
    assert f"when it is full: {policy}" in t.send("/context")
    t.leave()


@pytest.mark.slow
def test_a_full_context_says_what_to_do(tmp_path):
    t = Terminal(tmp_path, ["Yes."], context=128, max_tokens=8)
    t.send("a" * 60)
    text = t.send("b" * 60)
    assert "/undo" in text and "/clear" in text and "--on-overflow" in text
    t.send("/undo")
    assert "Yes." in t.send("c" * 60)
    t.leave()


def test_tools_run_after_a_yes_only(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    answers = [
        CALL.format("add", '{"a": 2, "b": 3}'), "Five.",
        CALL.format("add", '{"a": 2, "b": 3}'), "Then not.",
        CALL.format("fail", "{}"), "Broken.",
    ]  # fmt: skip
    t = Terminal(tmp_path, answers)
    assert "tools: add, fail" in t.send(f"/tools {tmp_path / 'tools.py'}")
    asked = t.send("What is 2+3?")
    assert '"name": "add"' in asked
    assert "Five." in t.send("y")
    t.send("Again?")
    declined = t.send("n")
    assert "add was not run" in declined and "Then not." in declined
    t.send("And now?")
    broken = t.send("yes")
    assert "it is broken" in broken and "Broken." in broken
    assert "3 turns" in t.send("/context")
    assert "1 turn left" in t.send("/undo 2")
    t.send(f"/save {tmp_path / 'chat.safetensors'}")
    assert "no tools" in t.send("/tools off")
    t.leave()


def test_ctrl_c_stops_an_answer_and_keeps_what_came(tmp_path):
    answers = [
        "It is 3.",
        "<think>\n" + "thinking " * 30, "It is 4.",
        'I add. <tool_call>\n{"name": "add", "arguments": {"a": "' + "x" * 300, "It is 5.",
        "One, two, three, " + "and so on " * 30, "It is 6.",
    ]  # fmt: skip
    (tmp_path / "tools.py").write_text(TOOLS)
    t = Terminal(tmp_path, answers, max_tokens=300, chunk=24)

    def ask_and_stop(question: str, at: str, presses: int = 1) -> str:
        t.hold(at)
        t.child.send(question + "\r")
        t.interrupt(presses)
        return t.wait()

    first = ask_and_stop("What is 1+2?", "prompt", presses=3)
    assert "/retry asks again" in first and "It is 3." not in first
    assert "0 turns" in t.send("/context")
    assert "It is 3." in t.send("/retry")
    thought = ask_and_stop("What is 2+2?", "20", presses=3)
    assert "thinking" in thought and "kept as far as it came" in thought
    assert "It is 4." in t.send("And now?")
    t.send(f"/tools {tmp_path / 'tools.py'}")
    assert "kept as far as it came" in ask_and_stop("What is 2+3?", "30")
    assert "It is 5." in t.send("And now?")
    said = ask_and_stop("Count.", "15")
    assert "One, two" in said and "kept as far as it came" in said
    assert "It is 6." in t.send("Go on.")
    assert "7 turns" in t.send("/context")
    t.leave()


def test_ctrl_c_at_a_question_about_a_tool_declines_it(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    t = Terminal(tmp_path, [CALL.format("add", '{"a": 2, "b": 3}'), "Then not."])
    t.send(f"/tools {tmp_path / 'tools.py'}")
    t.send("What is 2+3?")
    t.child.expect_exact("[y/N]")
    t.child.send(CTRL_C)
    declined = t.wait()
    assert "add was not run" in declined and "Then not." in declined
    t.leave()
