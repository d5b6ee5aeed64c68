"""What only a process of its own shows: signals, closed pipes, terminals, what gets imported."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENDLESS = ("-n", "3000", "--ignore-eos", "--temp", "1", "--seed", "1")
CTRL_C = b"\x03"
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("hears_ctrl_c")


def start(*argv: object, **options) -> subprocess.Popen:
    # Unbuffered: communicate() does not see what a buffer has already taken.
    pipes = {"bufsize": 0, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "mlxrt", *map(str, argv)], **(pipes | options))


def test_ctrl_c_keeps_what_was_generated(folder):
    child = start("generate", "-m", folder, "hello", *ENDLESS)
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    rest, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert (first + rest).decode().endswith("\n") and len(first) == 1
    [timing] = [line for line in err.decode().splitlines() if "prompt tokens" in line]
    assert "stopped" in timing and "seed 1" in timing
    assert b"Traceback" not in err


@pytest.mark.parametrize("started", ["module", "script", "library"])
def test_ctrl_c_while_modules_are_imported(tmp_path, started):
    """The interrupt comes from inside an import: a stand-in for MLX sends it."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\n")
    script = tmp_path / "mlxrt"  # what pip writes
    script.write_text("import sys\nfrom mlxrt.cli import main\nsys.exit(main())\n")
    how = {"module": ["-m", "mlxrt"], "script": [script], "library": ["-c", "import mlxrt"]}[started]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *how, "--version"], env=environment, capture_output=True, timeout=60)
    if started == "library":  # a program that imports the package keeps its own handling
        assert b"KeyboardInterrupt" in done.stderr and b"mlxrt: interrupted" not in done.stderr
    else:
        assert (done.returncode, done.stderr) == (130, b"mlxrt: interrupted\n")


def test_an_ignored_ctrl_c_stays_ignored(folder):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = start("generate", "-m", folder, "hello", "-n", "300", "--ignore-eos", "--seed", "1")
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0 and b"300 generated" in err and b"stopped" not in err


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(folder):
    # A stop string that random bytes do not hold: the answer must not end before the signal comes, however late.
    child = start("chat", "-m", folder, *ENDLESS, "--stop", "no such text", stdin=subprocess.PIPE)
    child.stdin.write(b"hello\n")
    child.stdin.flush()
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(b"/stats\n", timeout=60)
    assert child.returncode == 0
    assert b"stopped; the answer is kept" in err and b"1 turn" in err and b"Traceback" not in err


@pytest.mark.parametrize("as_help", [False, True])
def test_a_reader_that_leaves_is_no_crash(folder, as_help):
    child = start("generate", "--help") if as_help else start("generate", "-m", folder, "hello", *ENDLESS)
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    child.wait(timeout=60)
    child.stderr.close()
    assert child.returncode in (0, 1) and b"Traceback" not in err and b"Exception ignored" not in err


def test_closed_streams(folder):
    for redirected in (">&-", "2>&-", "<&-"):
        command = f'"$0" -m mlxrt generate -m "$1" hello -n 2 --json {redirected}'
        done = subprocess.run(["sh", "-c", command, sys.executable, folder.path], capture_output=True, timeout=60)
        assert done.returncode == (1 if redirected == ">&-" else 0)
        assert b"Traceback" not in done.stderr
        if done.returncode == 0:
            assert done.stdout.startswith(b"{") and done.stdout.count(b"\n") == 1


def test_any_locale_speaks_utf8(folder):
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    child = start("info", "-m", env=environment)
    assert b"Traceback" not in child.communicate(timeout=60)[1]
    child = start(
        "generate", "-m", folder, "--raw", "--json", "-n", "40", "--ignore-eos", env=environment, stdin=subprocess.PIPE
    )
    out, err = child.communicate("grüß".encode(), timeout=60)
    assert child.returncode == 0, err
    assert not out.decode("utf-8").isascii()


def read_some(terminal: int) -> bytes | None:
    """What was said until silence; None when nothing was, empty when the other side is closed."""
    said, patience = b"", 5.0
    while select.select([terminal], [], [], patience)[0]:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other side is closed
            piece = b""
        if not piece:
            return said
        said, patience = said + piece, 0.05
    return said or None


def on_terminal(*argv: object, typed: tuple[bytes, ...] = (), environment=None) -> tuple[int, bytes]:
    """Run with a terminal for all three streams; each piece is typed when a prompt waits for it."""
    ours, theirs = pty.openpty()
    settings = os.environ | {"TERM": "xterm"} | (environment or {})
    child = start(*argv, stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    pieces, seen, interrupting = list(typed), b"", False
    end = time.monotonic() + 90
    while time.monotonic() < end:
        piece = read_some(ours)
        if piece == b"":
            break
        if piece is None and interrupting:  # readline misses a signal between its prompt and its wait: press again
            child.send_signal(signal.SIGINT)
        seen += piece or b""
        if pieces and seen.endswith(b"> "):
            interrupting = pieces[0] == CTRL_C  # only a session's own terminal would make a signal of it
            child.send_signal(signal.SIGINT) if interrupting else os.write(ours, pieces[0])
            del pieces[0]
    else:
        child.kill()
    os.close(ours)
    return child.wait(timeout=60), seen


def test_no_prompt_on_a_terminal_is_one_line():
    code, seen = on_terminal("generate", environment={"NO_COLOR": "1"})
    assert code == 2
    assert seen.replace(b"\r\n", b"\n").decode() == (
        "mlxrt: there is no prompt; give it as an argument, with -p or through a pipe\n"
    )


def test_an_answer_imports_nothing_it_does_not_need(folder):
    script = (
        "import sys; from mlxrt.cli import main; main(sys.argv[1:]);"
        "print(sorted({'rich', 'transformers', 'huggingface_hub', 'mlx_lm', 'torch', 'gguf', 'sentencepiece'}"
        " & set(sys.modules)), file=sys.stderr)"
    )
    argv = [sys.executable, "-c", script, "generate", "-m", str(folder), "hello", "-n", "2"]
    done = subprocess.run(argv, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stderr.decode().splitlines()[-1] == "[]"


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["generate", "--top-p", "2", "hello"]])
def test_help_and_bad_flags_come_before_anything_heavy(argv):
    script = (
        "import sys; from mlxrt.cli import main; main(sys.argv[1:]);"
        "heavy = {'numpy', 'mlx.nn', 'mlxrt.engine.engine', 'mlxrt.engine.load', 'tokenizers'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, timeout=60)
    assert done.stderr.decode().splitlines()[-1] == "[]"
