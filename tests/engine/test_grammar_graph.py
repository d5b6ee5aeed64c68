"""Steps of rows with a grammar that are launched as graphs give the tokens of steps that MLX launches."""

import pytest

import mlxrt
from mlxrt.engine import cuda_graph
from mlxrt.engine import load as loader
from mlxrt.engine.cuda_graph import CudaGraphRunner
from mlxrt.kernels import make_gpu

from ..kernels.test_engine import folder  # noqa: F401  a fixture
from ..support.ascii_tokenizer import write_ascii_tokenizer
from ..support.kernels.fake_cuda import Bench, FakeLibrary
from ..support.log_lines import capture_log
from ..support.metal_sim import Simulator

PARENTHESES = {"type": "regex", "pattern": r"\([0-9]{14}[A-F]\)"}
DIGITS = {"type": "regex", "pattern": "[0-9]{12,40}"}


def ask(prompt, n, form=None, **params):
    params = mlxrt.SamplingParams(max_tokens=n, ignore_eos=True, **params)
    return mlxrt.Request(prompt=prompt, response_format=form, params=params)


ROUNDS = [
    [ask("12", 20, PARENTHESES)],
    [ask("AB", 20, PARENTHESES, temperature=1.0, seed=3, repetition_penalty=1.3)],
    [ask("AB", 18, PARENTHESES, temperature=1.0, seed=4, repetition_penalty=1.3)],
    [ask("AB", 18), ask("1", 20, DIGITS, temperature=0.9, seed=5), ask("2", 18, temperature=0.9, seed=6)],
    [ask("BA", 20, logprobs=2), ask("1", 20, DIGITS, temperature=0.9, seed=7), ask("3", 18, DIGITS)],
]


@pytest.mark.slow  # most of it is compiling
def test_graphs_stop_for_the_mask(folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cuda_graph, "WARMUP_STEPS", 1)
    monkeypatch.setattr(loader, "backend", lambda: "metal")
    write_ascii_tokenizer(folder, size=48)
    answers, said = [], capture_log("decode steps")
    for graphs in (False, True):
        library, device = FakeLibrary(Simulator(checked=False)), Bench()
        monkeypatch.setattr(loader, "make_gpu", lambda name, library=library, **_: make_gpu(name, library))
        with mlxrt.load(str(folder), mlxrt.EngineConfig(dequantise=False, max_context=512)) as engine:
            runner = engine.core.runner
            runner.compiled = True  # tables as wide as a compiled step wants them
            if graphs:
                step = runner.sample_step, runner.sample_fn
                runner.graphs = CudaGraphRunner(*step, runner.model, library, device, compiled_logits=runner.logits_fn)
            answers.append([engine.generate(asked) for asked in ROUNDS])
            steps = runner.graphs.steps if graphs else 0
    tokens = [[[c.tokens for c in done] for done in rounds] for rounds in answers]
    assert tokens[0] == tokens[1] and not said
    assert steps > 12 and device.launched > 1.8 * steps  # two graphs for a step with a mask
    assert [[c.logprobs for c in done] for done in answers[0]] == [[c.logprobs for c in done] for done in answers[1]]
