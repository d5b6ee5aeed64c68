"""Interleaving, dropped engines and token checks with made-up backends whose faults are known."""

import pytest

from mlxrt.bench.backend import BackendFailed, BackendRefused
from mlxrt.bench.comparison import PROCESSOR, Comparison, Options
from mlxrt.bench.result import OURS, Report
from mlxrt.bench.run import run_cases
from mlxrt.bench.statistics import StoppingRule
from mlxrt.bench.suites import Case, cases
from mlxrt.bench.token_cost import TokenCost
from tests.support.log_lines import capture_log


class FakeBackend:
    """A backend whose clock, answers and faults are given."""

    def __init__(self, name, pace=0.01, change=None, short=0, dies_at=None, refuses=None):
        self.name, self.closed = name, False
        self.pace, self.change, self.short, self.dies_at, self.refuses = pace, change, short, dies_at, refuses
        self.info = {"context": 4096, "dtype": "float32", "device": "cpu", "tokenizer": False, "vocab": 100}
        self.asked = []

    def ask(self, do, **question):
        self.asked.append((do, question))
        if do == "gap":
            return 2.5
        if self.refuses and question.get("config", {}).get("kv") == self.refuses:
            raise BackendRefused(f"{self.name}: no {self.refuses}")
        if self.dies_at is not None and len(self.asked) > self.dies_at:
            raise BackendFailed(f"{self.name} ended with status 1: out of luck")
        return self.answer(question["prompt"], question["max_tokens"])

    def answer(self, prompt, count):
        tokens = [(sum(prompt) + 7 * i * i) % 97 for i in range(count - self.short)]
        if self.change is not None and self.change < len(tokens):
            tokens[self.change] += 1
        at = [self.pace * (i + 1) for i in range(len(tokens))]
        return {"tokens": tokens, "at": at, "used": [t / 2 for t in at], "cached": 0, "peak": 10**6, "kv": 64}

    def kill(self):
        self.closed = True

    close = kill

    def restart(self):
        return FakeBackend(self.name, self.pace * 1.1)


class FakeModel:
    cost = TokenCost(1000, 1000, 500, ((8.0, 0),), 16)


def comparison(*backends, **options):
    rule = StoppingRule(width=0.05, min_rounds=3, max_rounds=8, seconds=5)
    made = Comparison(FakeModel(), {b.name: b for b in backends}, Options((16, 32), 8, rule), device_peak(), prompts)
    for name, value in options.items():
        setattr(made, name, value)
    return made


def device_peak():
    return {"copy_bytes_per_s": 1e6, "matmul_float32_flops": 1e9}


def prompts(count, section):
    return [(section + i) % 50 for i in range(count)]


def decode(made):
    [case, _] = cases("decode", made.options)
    return list(case.run(made))


def test_ratio_is_that_of_the_paces():
    [figure, memory] = decode(comparison(FakeBackend(OURS, 0.01), FakeBackend("mlx-lm", 0.013)))
    assert figure.ratios["mlx-lm"].value == pytest.approx(1.3)
    assert figure.engines[OURS].median == pytest.approx(100)
    assert figure.roofline_share(OURS) == pytest.approx(100 / (1e6 / FakeModel.cost.bytes_at(20)))
    assert figure.agreement["equal"] == figure.agreement["compared"] == {"mlx-lm": 3}
    assert memory.engines[OURS].median == 1.0


def test_processor_clock_is_read_where_it_is_chosen():
    [figure, _] = decode(comparison(FakeBackend(OURS), FakeBackend("mlx-lm"), clock=PROCESSOR))
    assert figure.engines[OURS].median == pytest.approx(200)


def test_rounds_alternate_and_warm_up_does_not_count():
    order = []
    a, b = FakeBackend(OURS), FakeBackend("mlx-lm")
    for backend in (a, b):
        backend.ask = lambda do, backend=backend, **q: (
            order.append(backend.name) or backend.answer(q["prompt"], q["max_tokens"])
        )
    [figure, _] = decode(comparison(a, b))
    assert order == ["mlx-lm", OURS, OURS, "mlx-lm", "mlx-lm", OURS, OURS, "mlx-lm"]
    assert len(figure.engines[OURS].values) == 3


def test_a_wrong_token_of_a_peer_is_found_and_reported():
    report = Report()
    made = comparison(FakeBackend(OURS), FakeBackend("mlx-lm", change=4))
    report.figures += decode(made)
    assert report.wrong == ["decode / after 16: mlx-lm differs at token 4"]
    [difference] = report.figures[0].agreement["differences"]
    assert difference["gap"] == 2.5 and difference["wrong"]


def test_our_own_wrong_token_is_found_too():
    report = Report(figures=decode(comparison(FakeBackend(OURS, change=2), FakeBackend("mlx-lm"))))
    assert "token 2" in report.wrong[0]


def test_a_peer_that_dies_drops_out_and_the_others_go_on():
    bad = FakeBackend("llama.cpp", dies_at=2)
    made = comparison(FakeBackend(OURS), FakeBackend("mlx-lm"), bad)
    [figure, _] = decode(made)
    assert len(figure.engines["mlx-lm"].values) == 3
    assert bad.closed and "llama.cpp" not in made.backends
    assert made.problems == ["llama.cpp ended with status 1: out of luck; llama.cpp takes no further part"]
    assert set(decode(made)[0].engines) == {OURS, "mlx-lm"}


def test_an_answer_that_is_too_short_does_not_count():
    made = comparison(FakeBackend(OURS), FakeBackend("mlx-lm", short=1))
    [figure, _] = decode(made)
    assert set(figure.engines) == {OURS} and "gave 2 of 3 tokens" in made.problems[0]


def test_our_own_failure_is_the_cases_failure():
    with pytest.raises(BackendFailed):
        decode(comparison(FakeBackend(OURS, dies_at=1), FakeBackend("mlx-lm")))


def test_a_refused_kind_drops_out_alone():
    made = comparison(FakeBackend(OURS, refuses="q4"), FakeBackend("mlx-lm"))
    made.ours.ask = lambda do, inner=made.ours.ask, **q: (
        {"kl": 0.1, "most": 0.2, "same_best": 0.9} if do == "logit_error" else inner(do, **q)
    )
    [case] = cases("kv", made.options)
    speed, memory, divergence, _ = case.run(made)
    assert "mlxrt q4" not in speed.engines and {"mlxrt q8", "mlx-lm 4 bit"} <= set(speed.engines)
    assert "mlxrt q4" not in memory.engines and set(divergence.engines) == {"mlxrt q8", "mlxrt k8v4"}
    assert made.problems == ["mlxrt q4 does not take part: mlxrt: no q4"]


def test_what_was_measured_is_kept_when_a_case_fails_or_the_user_stops():
    made, report = comparison(FakeBackend(OURS), FakeBackend("mlx-lm")), Report()
    made.problems = report.problems
    asked = []

    def refuse(comparison):
        raise BackendRefused("not here")

    def run_then_stop(comparison):
        yield from decode(comparison)
        asked.append(1)

    todo = [
        Case("decode", "bad", refuse),
        Case("decode", "good", run_then_stop),
        Case("decode", "never", run_then_stop),
    ]
    made.stop = lambda: bool(asked)
    logged = capture_log()
    with pytest.raises(KeyboardInterrupt):
        run_cases(todo, made, report, 1e18)
    assert len(report.figures) == 2 and not report.complete
    assert report.problems == logged == ["decode / bad: not here"]


def test_stopping_inside_a_case_keeps_its_rounds():
    made = comparison(FakeBackend(OURS), FakeBackend("mlx-lm"))
    made.stop = lambda: len(made.ours.asked) >= 3  # the warm-up and two rounds
    [figure, _] = decode(made)
    assert len(figure.engines[OURS].values) == 2


def test_restarts_take_new_processes_within_a_case():
    first = FakeBackend(OURS, 0.01), FakeBackend("mlx-lm", 0.02)
    made = comparison(*first, restarts=2)
    [figure, _] = decode(made)
    assert all(backend.closed for backend in first) and made.processes == 3
    assert [round(1 / v, 5) for v in figure.engines[OURS].values] == [0.01, 0.011, 0.0121]
    assert figure.ratios["mlx-lm"].value == pytest.approx(2.0)


def test_level_of_the_intervals_is_the_one_asked_for():
    made = comparison(FakeBackend(OURS, 0.01), FakeBackend("mlx-lm", 0.013))
    made.options = Options((16, 32), 8, StoppingRule(width=0.05, level=0.99, min_rounds=8, max_rounds=8, seconds=5))
    assert decode(made)[0].ratios["mlx-lm"].level > 0.99


def test_an_engine_that_sleeps_is_noted_by_wall_time():
    ours, sleepy = FakeBackend(OURS, 0.01), FakeBackend("mlx-lm", 0.02)
    awake = sleepy.answer
    sleepy.answer = lambda prompt, count: awake(prompt, count) | {"used": [0.005 * (i + 1) for i in range(count)]}
    made = comparison(ours, sleepy, clock=PROCESSOR)
    made.options = Options((16, 32), 8, StoppingRule(min_rounds=8, max_rounds=8, seconds=5))
    [figure, _] = decode(made)
    assert figure.ratios["mlx-lm"].conclusion == "same" and "waits for something" in figure.notes[0]
    assert decode(comparison(FakeBackend(OURS), FakeBackend("mlx-lm"), clock=PROCESSOR))[0].notes == ()
