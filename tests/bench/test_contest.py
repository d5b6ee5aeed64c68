"""Turns, drops and verdicts with engines that are made up, so that their faults are known."""

import pytest

from mlxrt.bench.contest import PROCESSOR, Contest, Options
from mlxrt.bench.result import OURS, Report
from mlxrt.bench.run import go_through
from mlxrt.bench.side import Refused, SideFailed
from mlxrt.bench.statistics import Patience
from mlxrt.bench.suites import Case, cases
from mlxrt.bench.work import Work


class Made:
    """A side whose clock, answers and faults are given."""

    def __init__(self, name, pace=0.01, change=None, short=0, dies_at=None, refuses=None):
        self.name, self.gone = name, False
        self.pace, self.change, self.short, self.dies_at, self.refuses = pace, change, short, dies_at, refuses
        self.told = {"context": 4096, "dtype": "float32", "device": "cpu", "tokenizer": False, "vocab": 100}
        self.asked = []

    def ask(self, do, **question):
        self.asked.append((do, question))
        if do == "gap":
            return 2.5
        if self.refuses and question.get("config", {}).get("kv") == self.refuses:
            raise Refused(f"{self.name}: no {self.refuses}")
        if self.dies_at is not None and len(self.asked) > self.dies_at:
            raise SideFailed(f"{self.name} ended with status 1: out of luck")
        return self.answer(question["prompt"], question["max_tokens"])

    def answer(self, prompt, count):
        tokens = [(sum(prompt) + 7 * i * i) % 97 for i in range(count - self.short)]
        if self.change is not None and self.change < len(tokens):
            tokens[self.change] += 1
        at = [self.pace * (i + 1) for i in range(len(tokens))]
        return {"tokens": tokens, "at": at, "used": [t / 2 for t in at], "cached": 0, "peak": 10**6, "kv": 64}

    def abandon(self):
        self.gone = True

    close = abandon

    def again(self):
        return Made(self.name, self.pace * 1.1)


class Under:
    work = Work(1000, 1000, 500, ((8.0, 0),), 16)


def contest(*sides, **options):
    patience = Patience(width=0.05, least=3, most=8, seconds=5)
    made = Contest(Under(), {s.name: s for s in sides}, Options((16, 32), 8, patience), roof(), prompts)
    for name, value in options.items():
        setattr(made, name, value)
    return made


def roof():
    return {"copy_bytes_per_s": 1e6, "matmul_float32_flops": 1e9}


def prompts(count, stretch):
    return [(stretch + i) % 50 for i in range(count)]


def decode(made):
    [case, _] = cases("decode", made.options)
    return list(case.run(made))


def test_ratio_is_that_of_the_paces():
    [figure, memory] = decode(contest(Made(OURS, 0.01), Made("mlx-lm", 0.013)))
    assert figure.ratios["mlx-lm"].value == pytest.approx(1.3)
    assert figure.sides[OURS].median == pytest.approx(100)
    assert figure.share(OURS) == pytest.approx(100 / (1e6 / Under.work.bytes_at(20)))
    assert figure.agreement["equal"] == figure.agreement["compared"] == {"mlx-lm": 3}
    assert memory.sides[OURS].median == 1.0


def test_processor_clock_is_read_where_it_is_chosen():
    [figure, _] = decode(contest(Made(OURS), Made("mlx-lm"), clock=PROCESSOR))
    assert figure.sides[OURS].median == pytest.approx(200)


def test_turns_alternate_and_warm_up_does_not_count():
    order = []
    a, b = Made(OURS), Made("mlx-lm")
    for side in (a, b):
        side.ask = lambda do, side=side, **q: order.append(side.name) or side.answer(q["prompt"], q["max_tokens"])
    [figure, _] = decode(contest(a, b))
    assert order == ["mlx-lm", OURS, OURS, "mlx-lm", "mlx-lm", OURS, OURS, "mlx-lm"]
    assert len(figure.sides[OURS].values) == 3


def test_a_wrong_token_of_a_peer_is_found_and_told():
    report = Report()
    made = contest(Made(OURS), Made("mlx-lm", change=4))
    report.figures += decode(made)
    assert report.wrong == ["decode / after 16: mlx-lm differs at token 4"]
    [difference] = report.figures[0].agreement["differences"]
    assert difference["gap"] == 2.5 and difference["wrong"]


def test_our_own_wrong_token_is_found_too():
    report = Report(figures=decode(contest(Made(OURS, change=2), Made("mlx-lm"))))
    assert "token 2" in report.wrong[0]


def test_a_peer_that_dies_drops_out_and_the_others_go_on():
    bad = Made("llama.cpp", dies_at=2)
    made = contest(Made(OURS), Made("mlx-lm"), bad)
    [figure, _] = decode(made)
    assert len(figure.sides["mlx-lm"].values) == 3
    assert bad.gone and "llama.cpp" not in made.sides
    assert made.problems == ["llama.cpp ended with status 1: out of luck; llama.cpp takes no further part"]
    assert set(decode(made)[0].sides) == {OURS, "mlx-lm"}


def test_an_answer_that_is_too_short_does_not_count():
    made = contest(Made(OURS), Made("mlx-lm", short=1))
    [figure, _] = decode(made)
    assert set(figure.sides) == {OURS} and "gave 2 of 3 tokens" in made.problems[0]


def test_our_own_failure_is_the_cases_failure():
    with pytest.raises(SideFailed):
        decode(contest(Made(OURS, dies_at=1), Made("mlx-lm")))


def test_a_refused_kind_drops_out_alone():
    made = contest(Made(OURS, refuses="q4"), Made("mlx-lm"))
    made.ours.ask = lambda do, inner=made.ours.ask, **q: (
        {"kl": 0.1, "most": 0.2, "same_best": 0.9} if do == "logit_error" else inner(do, **q)
    )
    [case] = cases("kv", made.options)
    speed, memory, divergence, _ = case.run(made)
    assert "mlxrt q4" not in speed.sides and {"mlxrt q8", "mlx-lm 4 bit"} <= set(speed.sides)
    assert "mlxrt q4" not in memory.sides and set(divergence.sides) == {"mlxrt q8", "mlxrt k8v4"}
    assert made.problems == ["mlxrt q4 does not take part: mlxrt: no q4"]


def test_what_was_measured_is_kept_when_a_case_fails_or_the_user_stops():
    made, report = contest(Made(OURS), Made("mlx-lm")), Report()
    made.problems = report.problems
    asked = []

    def refused(contest):
        raise Refused("not here")

    def stops(contest):
        yield from decode(contest)
        asked.append(1)

    todo = [Case("decode", "bad", refused), Case("decode", "good", stops), Case("decode", "never", stops)]
    made.stop = lambda: bool(asked)
    said = []
    with pytest.raises(KeyboardInterrupt):
        go_through(todo, made, report, said.append, 1e18)
    assert len(report.figures) == 2 and not report.complete
    assert report.problems == said == ["decode / bad: not here"]


def test_stopping_inside_a_case_keeps_its_rounds():
    made = contest(Made(OURS), Made("mlx-lm"))
    made.stop = lambda: len(made.ours.asked) >= 3  # the warm-up and two rounds
    [figure, _] = decode(made)
    assert len(figure.sides[OURS].values) == 2


def test_restarts_take_new_processes_within_a_case():
    first = Made(OURS, 0.01), Made("mlx-lm", 0.02)
    made = contest(*first, restarts=2)
    [figure, _] = decode(made)
    assert all(side.gone for side in first) and made.processes == 3
    assert [round(1 / v, 5) for v in figure.sides[OURS].values] == [0.01, 0.011, 0.0121]
    assert figure.ratios["mlx-lm"].value == pytest.approx(2.0)


def test_level_of_the_intervals_is_the_one_asked_for():
    made = contest(Made(OURS, 0.01), Made("mlx-lm", 0.013))
    made.options = Options((16, 32), 8, Patience(width=0.05, level=0.99, least=8, most=8, seconds=5))
    assert decode(made)[0].ratios["mlx-lm"].level > 0.99


def test_an_engine_that_sleeps_is_told_by_the_wall():
    ours, sleepy = Made(OURS, 0.01), Made("mlx-lm", 0.02)
    awake = sleepy.answer
    sleepy.answer = lambda prompt, count: awake(prompt, count) | {"used": [0.005 * (i + 1) for i in range(count)]}
    made = contest(ours, sleepy, clock=PROCESSOR)
    made.options = Options((16, 32), 8, Patience(least=8, most=8, seconds=5))
    [figure, _] = decode(made)
    assert figure.ratios["mlx-lm"].verdict == "same" and "waits for something" in figure.notes[0]
    assert decode(contest(Made(OURS), Made("mlx-lm"), clock=PROCESSOR))[0].notes == ()
