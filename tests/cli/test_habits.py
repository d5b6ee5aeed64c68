"""What hands that know other tools type: aliases, names in other places, wrong words, options without effect."""

import json
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import mlxrt
from mlxrt import BadRequest, EngineConfig, _openblas

FRANCE = "What is the capital"


def answer(cli, folder, *flags) -> str:
    return cli("generate", "-m", folder, "-n", 6, *flags, FRANCE).out


def test_run_answers_a_prompt_or_chats(cli, folder):
    want = answer(cli, folder)
    assert cli("run", folder, "-n", 6, FRANCE).out == want
    assert cli("run", folder, "-n", 6, *FRANCE.split()).out == want
    assert cli("run", folder, "-n", 6, stdin=FRANCE.encode()).out == want
    assert cli("chat", folder, "-n", 6, stdin=FRANCE.encode()).out == want
    assert "two models are given" in cli("chat", folder, "-m", folder).refused(2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["generate", *FRANCE.split()], f'the prompt has 4 words; quote it: mlxrt generate "{FRANCE}"'),
        (["generate", "smollm2", FRANCE], f'the model goes with -m: mlxrt generate -m smollm2 "{FRANCE}"'),
        (["generat", FRANCE], "unknown command 'generat'; did you mean generate?"),
        (["fly"], "unknown command 'fly'; commands: generate, chat, run, "),
        (["generate", "--disk-cache-bytes", "1G", "hi"], "disk_cache_bytes limits the disk cache, which is off"),
    ],
)
def test_wrong_words_name_the_right_ones(cli, words, line):
    assert line in cli(*words).refused(2)


def test_help_has_examples_and_kinds(cli):
    shown = cli("help", "generate")
    assert shown.code == 0 and shown.out == cli("generate", "--help").out
    assert "examples:\n  mlxrt generate " in shown.out and "auto|strict|reference" in shown.out


def test_options_without_effect_are_named(cli, folder):
    flags = ("--top-k", 5, "--seed", 5)
    line = "--top-k, --seed: no effect at temperature 0"
    assert line in cli("generate", "-m", folder, "-n", 2, *flags, "hi").err
    assert line not in cli("generate", "-m", folder, "-n", 2, *flags, "--temperature", 1, "hi").err


def test_no_limit_of_tokens_goes_to_the_end_of_the_context(cli, folder):
    flags = ("--max-context", 60, "--ignore-eos", "--json")
    done = json.loads(cli("generate", "-m", folder, "-n", -1, *flags, "hi").out)
    assert done["timings"]["prompt_tokens"] + len(done["tokens"]) in (60, 61) and done["finish_reason"] == "length"
    shown = cli("generate", "-m", folder, "-n", -1, *flags[:-1], "hi")
    assert "ended by the context, which is full" in shown.err


def test_prompts_come_through_a_pipe_with_the_ids_of_other_tools(cli, folder):
    lines = b'{"custom_id": "a", "prompt": "hi", "max_tokens": 2}\n"hello"\n'
    result = cli("generate", "-m", folder, "--prompts", "-", "-n", 2, stdin=lines)
    first, second = map(json.loads, result.out.splitlines())
    assert result.code == 0 and first["id"] == "a" and "id" not in second
    assert "4 tokens in " in result.err and " tok/s" in result.err
    wrong = cli("generate", "-m", folder, "--prompts", "-", stdin=b'{"prompt": "hi", "max_token": 2}')
    assert "unknown key max_token; did you mean max_tokens?" in wrong.refused(2)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["x" * 5000], "the prompt has 5019 tokens, the context holds 4096"),
        (["--raw", "x" * 5000], "the prompt has 5000 tokens, the context holds 4096"),
    ],
)
def test_prompts_are_refused_before_a_weight_is_read(cli, folder, flags, line, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("mlxrt.engine.load.build", refuse)
    assert line in cli("generate", "-m", folder, *flags).refused(2)


def test_quiet_prints_the_answer_alone(cli, folder):
    loud, quiet = (cli("generate", "-m", folder, "-n", 4, *flag, "hi") for flag in ((), ("-q",)))
    assert "4 generated" in loud.err and (quiet.out, quiet.err) == (loud.out, "")
    assert cli("chat", folder, "-n", 400, "--stop", "x", "-q", stdin=b"hi").err.count("\n") <= 1
    wasted = cli("generate", "-m", folder, "-n", 4, "-q", "--seed", 3, "hi")
    assert wasted.err.count("\n") == 1 and "no effect" in wasted.err


def test_a_folder_without_a_model_is_not_pulled(cli, tmp_path, folder):
    (tmp_path / "notes").mkdir()
    assert "it holds no model" in cli("pull", tmp_path / "notes").refused(2)
    assert cli("pull", folder).code == 0


def test_the_limit_of_a_disk_cache_needs_the_cache():
    with pytest.raises(BadRequest, match="disk_cache_bytes limits the disk cache"):
        EngineConfig(disk_cache_bytes="1G")


def test_a_shell_completes_commands_and_flags(tmp_path):
    pytest.importorskip("argcomplete")
    for line, wanted in (("mlxrt ge", "generate"), ("mlxrt generate --max-c", "--max-context")):
        shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
        shell |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words")}
        subprocess.run([sys.executable, "-m", "mlxrt"], env=os.environ | shell, check=True)
        assert wanted in (tmp_path / "words").read_text().split()


@pytest.mark.parametrize("file", ["__init__.py", f"core{EXTENSION_SUFFIXES[0]}"])
def test_a_missing_backend_is_one_line(file, tmp_path):
    """Something that shadows MLX: nothing inside, or a library that cannot be loaded, as mlx has it without mlx-cpu."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / file).write_text("")
    program = "import sys; from mlxrt.cli import main; sys.exit(main(sys.argv[1:]))"
    shell = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(mlxrt.__file__).parents[1]}"}

    def run(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", program, *words]
        return subprocess.run(command, env=shell, capture_output=True, text=True, check=False)

    assert run("--help").returncode == 0 and run("generate", "--help").returncode == 0
    done = run("generate", "hi")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("mlxrt: there is no MLX backend; install one: pip install 'mlxrt[cpu]'")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is loaded on Linux only")
def test_a_busy_machine_gets_fewer_threads(monkeypatch, tmp_path):
    class Blas:
        threads = 8

        def openblas_get_num_threads(self) -> int:
            return self.threads

        def openblas_set_num_threads(self, number: int) -> None:
            self.threads = number

    blas, load_file = Blas(), tmp_path / "loadavg"
    monkeypatch.setattr(_openblas, "LOAD_FILE", str(load_file))
    monkeypatch.setattr(_openblas.ctypes, "CDLL", lambda name: blas)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def choose(load: str, threads: int = 8) -> int:
        load_file.write_text(load)
        blas.threads = threads
        said = _openblas.yield_to_others()
        assert (f"{blas.threads} of {threads} threads; OMP_NUM_THREADS sets" in said) == (blas.threads != threads)
        return blas.threads

    assert choose("0.30 0.00 0.00 1/812 1234") == 8
    assert choose("5.20 0.00 0.00 9/812 1234") == 3
    assert choose("50.00 0.00 0.00 60/812 1234") == 1
    assert choose("50.00 0.00 0.00 1/812 1234") == 8  # what kept the machine busy has just ended
    assert choose("no numbers") == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose("50.00 0.00 0.00 60/812 1234") == 8
