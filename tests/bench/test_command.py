"""`mlxrt bench` with real engines in real processes, on a tiny model; and what it says to a call that is wrong."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import mlxrt
from mlxrt.bench.backend import Backend, BackendFailed, environment
from mlxrt.bench.bench_model import BenchModel
from mlxrt.bench.result import OURS, Report
from mlxrt.bench.statistics import StoppingRule
from mlxrt.weights.source.resolve import resolve

from .faulty_backends import CHANGED_TOKEN

FAST = ("--lengths", "12,16", "--tokens", "4", "--rounds", "2", "--minutes", "5", "--threads", "1")


@pytest.fixture
def two_rounds(monkeypatch):
    """However wide the intervals are: what is tried is not the statistics."""
    monkeypatch.setattr("mlxrt.bench.run.StoppingRule", partial(StoppingRule, max_rounds=2))


@pytest.mark.slow
def test_suites_against_mlx_lm(cli, two_rounds, folder, tmp_path):
    out = tmp_path / "a.json"
    asked = ("decode", "prefix", "batch", "nosuch", "-m", folder, "--peer", "mlx-lm", "--json", out)
    pytest.importorskip("matplotlib")
    page = tmp_path / "a.html"
    result = cli("bench", *asked, "--html", page, *FAST)
    assert result.code == 2 and "Traceback" not in result.err, result
    report = Report.load(out)
    assert [p for p in report.problems if "nosuch" not in p] == [] and report.complete and not report.wrong
    assert "there is no suite 'nosuch'" in result.err
    names = {f.name for f in report.figures}
    assert {"decode / after 12 / decode", "decode / after 16 / decode"} <= names
    assert {"prefix / second turn, 16 / first token", "prefix / restart, 16 / first token"} <= names
    for f in report.figures:
        assert set(f.engines) == {OURS, "mlx-lm"}, f.name
        if f.agreement and f.what != "first token cold":
            assert f.agreement["compared"] == f.agreement["equal"]
    assert report.model["digest"] and report.device_peak["copy_bytes_per_s"] > 0 and "before" in report.machine
    assert "second turn, 16" in result.out and "<svg" in page.read_text()


@pytest.mark.slow
def test_serving_suite_against_mlx_lm(cli, two_rounds, folder, tmp_path):
    out = tmp_path / "a.json"
    result = cli("bench", "serving", "-m", folder, "--peer", "mlx-lm", "--json", out, *FAST)
    assert result.code == 0, result
    figures = {f.what: f for f in Report.load(out).figures}
    assert all(set(f.engines) == {OURS, "mlx-lm"} for f in figures.values()) and len(figures) == 6
    assert figures["positions computed a token"].engines[OURS].median == pytest.approx(1.0, abs=0.02)
    assert figures["KV bytes a token"].engines[OURS].median > 0


def test_plots_without_matplotlib_name_the_extra(cli, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "mlxrt[bench]" in cli("bench", "decode", "-m", folder, "--html", "a.html").refused(2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("nosuch",), "no suite 'nosuch'"),
        (("decode", "--peer", "ollama"), "unknown peer 'ollama'"),
        (("decode", "--width", "0"), "--width must be"),
        (("decode", "--lengths", "1"), "--lengths must be"),
        (("decode", "--clock", "sun"), "sun"),
        (("compare", "a.json"), "two reports"),
        (("compare", "a.json", "b.json"), "cannot be read"),
        (("history", "/nowhere"), "not a folder"),
        ((), "required"),
    ],
)
def test_a_wrong_call_is_one_line(cli, argv, message):
    result = cli("bench", *argv)
    assert result.code == 2 and "Traceback" not in result.err
    assert message in result.err


@pytest.mark.parametrize("model", ["shape:qwen9-1b", "shape:qwen3-8b@7bit", "./nowhere"])
def test_an_unknown_model_is_one_line(cli, model):
    cli("bench", "decode", "-m", model).refused(2)


def test_a_model_that_does_not_fit_is_one_line(cli):
    assert "GB are free" in cli("bench", "decode", "-m", "shape:gpt-oss-120b").refused(2)


def test_a_model_that_does_not_fit_is_refused_before_it_is_made():
    under = BenchModel.find("shape:gpt-oss-120b")
    assert under.cost.weight_bytes > 2e11
    with pytest.raises(mlxrt.WontFit, match="GB are free") as caught:
        under.check_fits(2)
    assert caught.value.exit_code == 2


def test_token_cost_of_a_shape_is_that_of_its_matrices():
    """SmolLM2: 30 layers of 576 x (576 + 2 x 192 + 576 + 3 x 1536), and the tied head."""
    cost = BenchModel.find("shape:smollm2-135m").cost
    matrices = 30 * 576 * (576 + 192 + 192 + 576 + 3 * 1536) + 49152 * 576
    assert cost.active_weights == matrices
    wide = cost.bytes_read // matrices
    assert cost.bytes_read == matrices * wide and wide in (2, 4)
    assert cost.bytes_at(100) - cost.bytes_at(0) == 100 * 30 * 2 * 3 * 64 * wide
    four = BenchModel.find("shape:smollm2-135m@4bit").cost
    assert four.active_weights == matrices and four.bytes_read == pytest.approx(
        matrices * (4 + 16 * wide / 2 * 2 / 64) / 8, rel=0.1
    )
    experts = BenchModel.find("shape:qwen3-30b-a3b@4bit").cost
    assert experts.active_weights < 0.15 * 30.5e9 < experts.weight_bytes * 2


def test_a_dead_url_is_absent_and_the_rest_is_measured(cli, two_rounds, folder, tmp_path):
    out = tmp_path / "a.json"
    result = cli("bench", "decode", "-m", folder, "--peer", "http://127.0.0.1:9/v1", "--json", out, *FAST)
    assert result.code == 2 and "no answer from http://127.0.0.1:9/v1" in result.err
    report = Report.load(out)
    assert "absent" in report.backends["http://127.0.0.1:9/v1"] and len(report.figures) == 4


class Server(BaseHTTPRequestHandler):
    """/v1/completions by an engine of the same model, told what to answer wrongly."""

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            done = self.server.engine.generate(asked["prompt"], max_tokens=asked["max_tokens"], ignore_eos=True)
        usage = {"prompt_tokens": done.timings.prompt_tokens, "completion_tokens": len(done.tokens)}
        text = self.server.spoil(done.text)
        if not asked.get("stream"):
            self.answer(json.dumps({"choices": [{"text": text}], "usage": usage}))
            return
        pieces = [text[i : i + 2] for i in range(0, len(text), 2)]
        chunks = [{"choices": [{"text": piece}]} for piece in pieces] + [{"choices": [], "usage": usage}]
        self.answer("".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        return None


@pytest.fixture
def server(folder):
    with mlxrt.load(str(folder)) as engine, ThreadingHTTPServer(("", 0), Server) as made:
        made.engine, made.lock, made.spoil = engine, threading.Lock(), lambda text: text
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_server_behind_a_url(cli, two_rounds, folder, server, tmp_path, spoilt):
    if spoilt:
        server.spoil = lambda text: "~~" + text[2:]
    url, out = f"http://127.0.0.1:{server.server_port}/v1", tmp_path / "a.json"
    result = cli("bench", "decode", "batch", "-m", folder, "--peer", url, "--json", out, "--requests", "2", *FAST)
    report = Report.load(out)
    assert not report.problems, result
    assert all(url in f.engines for f in report.figures if f.what != "peak memory")
    remarks = [r for f in report.figures for r in (f.agreement or {}).get("remarks", ())]
    assert any("not our text" in r for r in remarks) == spoilt, remarks


def test_a_wrong_token_of_an_engine_is_caught(cli, two_rounds, folder, tmp_path, monkeypatch):
    """Another mlxrt stands in for mlx-lm, and changes one token of every answer."""
    setting = {"model": str(folder), "fault": "wrong token"}
    start = partial(Backend, "mlx-lm", setting, program="tests.bench.faulty_backends")
    monkeypatch.setattr("mlxrt.bench.run.start_peer", lambda *_: start())
    out = tmp_path / "a.json"
    result = cli("bench", "decode", "-m", folder, "--peer", "mlx-lm", "--json", out, *FAST)
    report = Report.load(out)
    assert result.code == 1 and "(WRONG)" in result.out and "0 of 4 answers of peers equal ours" in result.out
    assert report.wrong == [f"decode / after {n}: mlx-lm differs at token {CHANGED_TOKEN}" for n in (12, 16)]
    hashes = report.figures[0].agreement["hashes"]
    assert len(hashes[OURS]) == len(hashes["mlx-lm"]) == 1 and hashes[OURS] != hashes["mlx-lm"]


def test_a_backend_that_dies_says_why():
    with pytest.raises(BackendFailed, match=r"mlxrt ended with status 1: .*KeyError"):
        Backend("mlxrt", {})


def read_until(terminal: int, wanted: bytes | None) -> bytes:
    """What a terminal shows until these bytes are in it, or until nobody writes to it any more."""
    seen = b""
    while wanted is None or wanted not in seen:
        try:
            more = os.read(terminal, 4096)
        except OSError:  # Linux' word for the end
            more = b""
        if not more:
            assert wanted is None, seen
            break
        seen += more
    return seen


def test_ctrl_c_keeps_what_was_measured(folder, tmp_path, hears_ctrl_c):
    out = tmp_path / "a.json"
    argv = ["bench", "decode", "-m", str(folder), "--peer", "none", "--json", str(out), "--lengths", "8"]
    many = ["--rounds", "1000", "--minutes", "50", "--width", "0.1", "--threads", "1", "--tokens", "2"]
    command = [sys.executable, "-m", "mlxrt", *argv, *many]
    terminal, stderr = pty.openpty()  # on a terminal every round is shown
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment({})) as run:
        os.close(stderr)
        complaints = read_until(terminal, b"round 3")
        run.send_signal(signal.SIGINT)
        complaints += read_until(terminal, None)
        said, _ = run.communicate(timeout=120)
    os.close(terminal)
    assert run.returncode == 130 and b"Traceback" not in complaints
    report = Report.load(out)
    assert not report.complete and len(report.figures) == 2 and "NOT COMPLETE" in said


def test_folder_in_half_precision_is_exported_for_mlx_lm(folder, tmp_path, monkeypatch):
    import mlx.core as mx

    from mlxrt.bench.bench_model import mlx_lm_setting
    from tests.cli.conftest import weights

    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))
    assert mlx_lm_setting(resolve(str(folder))) == {"folder": str(folder)}
    folder.store({name: array.astype(mx.bfloat16) for name, array in weights().items()})
    made = mlx_lm_setting(resolve(str(folder)))["folder"]
    assert made != str(folder) and os.path.exists(os.path.join(made, "tokenizer.json"))
    stored = mx.load(os.path.join(made, "model.safetensors"))
    assert {array.dtype for array in stored.values()} == {mx.float32} and stored.keys() == weights().keys()
    assert mx.array_equal(stored["lm_head.weight"], weights()["lm_head.weight"].astype(mx.bfloat16).astype(mx.float32))
