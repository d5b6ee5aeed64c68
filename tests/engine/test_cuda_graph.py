"""Decode steps launched again without MLX give the tokens of steps that MLX launches."""

from itertools import combinations
from random import Random

import mlx.core as mx
import pytest

import mlxrt
from mlxrt.engine import cuda_graph as replay
from mlxrt.engine import load as loader
from mlxrt.engine.cuda_graph import CudaGraphRunner
from mlxrt.engine.model_runner import ModelRunner
from mlxrt.kernels import Kernels, argmax, make_gpu
from tests.support.log_lines import capture_log
from tests.support.toy_models import KINDS

from ..kernels.test_engine import PROMPT, folder  # noqa: F401  a fixture
from ..kernels.test_families import SHAPES, answer, made
from ..support.kernels.fake_cuda import Bench, FakeLibrary
from ..support.metal_sim import Simulator

OTHER = [5, 1, 44, 23]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Simulated steps take long: the second tail of a shape is recorded, however short the first was."""
    monkeypatch.setattr(replay, "WARMUP_STEPS", 1)


def launch_once(kernels, folder):  # noqa: F811
    """In place of self-tests, which take longest here: one launch that is not the model's."""
    kernels.self_test = lambda op, dtype: argmax.launch(kernels.gpu, mx.zeros((1, 8)))


def attach_graphs(runner, library, device):
    step, layers = (runner.sample_step, runner.sample_fn), runner.recurrent_layers
    runner.graphs = CudaGraphRunner(*step, runner.model, library, device, recurrent=layers)


@pytest.fixture
def engines(folder, monkeypatch):  # noqa: F811
    """Two of them on simulated kernels: as it is, and with steps that are launched again."""
    made = []

    def make(again: bool, **config):
        library = FakeLibrary(Simulator(checked=False))
        monkeypatch.setattr(loader, "backend", lambda: "metal")
        monkeypatch.setattr(loader, "make_gpu", lambda name, **_: make_gpu(name, library))
        monkeypatch.setattr(loader, "verify_on_first_use", launch_once)
        options = mlxrt.EngineConfig(dequantise=False, max_context=512, **config)
        engine = mlxrt.load(str(folder), options)
        runner = engine.core.runner
        runner.compiled = True  # tables as wide as a compiled step wants them; the step itself cannot be compiled here
        device, said = Bench(), capture_log("decode steps")
        if again:
            attach_graphs(runner, library, device)
        made.append(engine)
        return engine, device, said

    yield make
    for engine in made:
        engine.close()


def ask(tokens, n, **params):
    return mlxrt.Request(tokens=tuple(tokens), params=mlxrt.SamplingParams(max_tokens=n, ignore_eos=True, **params))


def both(engines, *rounds, **config):
    """The answers of each round of requests, from both engines; the second one's device."""
    answers = []
    for again in (False, True):
        engine, device, said = engines(again, **config)
        answers.append([[c.tokens for c in engine.generate(list(asked))] for asked in rounds])
    assert answers[0] == answers[1]
    return engine, device, said


def test_one_request_longer_than_several_tails(engines):
    """Whole tails go from one to the next without waiting; the table is a wider one at the end."""
    engine, device, said = both(engines, [ask([i % 41 for i in range(190)], 68)])
    assert device.launched == engine.core.runner.graphs.steps == 31 + 32 and not said


@pytest.mark.parametrize("kv", ["full", "q8"])
def test_tails_that_end_within_blocks_go_on_without_waiting(engines, kv):
    """Rows of other lengths: a tail is two pieces of a row each, in the pools before the next one reads them."""
    prompts = [[i % 41 for i in range(n)] for n in (135, 140)]
    config = {"prefix_cache": False, "kv": kv}
    _, device, said = both(engines, [ask(p, 3) for p in prompts], [ask(p, 36) for p in prompts], **config)
    assert device.launched > 30 and device.flushes == 1 and not said


def test_a_window_with_kept_tokens_is_nothing_but_kernels(engines, folder):  # noqa: F811
    """Tails that go on while the window leaves blocks behind. The truth is plain MLX, nothing simulated."""
    asked, window = ask([i * 7 % 41 for i in range(150)], 52), {"max_kv_size": 40, "chunk": 64}
    with mlxrt.load(str(folder), mlxrt.EngineConfig(dequantise=False, kernels="reference", **window)) as plain:
        [expected] = plain.generate([asked])
    engine, device, said = engines(True, kernels="strict", **window)
    [found] = engine.generate([asked])
    assert found.tokens == expected.tokens and not said
    assert device.launched == engine.core.runner.graphs.steps > 32
    assert "paged_attention" in engine.core.runner.model.kernels.used


@pytest.mark.parametrize("name", SHAPES)
def test_steps_of_these_families_are_nothing_but_kernels(name):
    with made(name, Kernels("reference")) as plain:
        expected = answer(plain, 6)
    library, said = FakeLibrary(Simulator(checked=False)), capture_log("decode steps")
    with made(name, Kernels("strict", make_gpu("metal", library))) as engine:
        runner, device = engine.core.runner, Bench()
        attach_graphs(runner, library, device)
        assert [answer(engine, 6) for _ in range(3)] == [expected] * 3
    assert not said and device.launched == 2 * 5 - 1  # all but those of the first answer, and the one that was recorded


MANY_ROWS = ["qwen3-30b-a3b", "qwen3.5-35b-a3b", "gemma4-e2b", "minimax-m2"]


@pytest.mark.parametrize("name", MANY_ROWS)
def test_steps_of_many_rows_are_nothing_but_kernels(name):
    """By matrix units, which take half precision; experts read once for all of their tokens."""
    asked, answers = [ask([*range(i, 2 * i + 3)], 4) for i in range(9)], []
    for again in (False, True):
        library, said, device = FakeLibrary(Simulator(checked=False)), capture_log("decode steps"), Bench()
        kernels = Kernels("strict", make_gpu("metal", library))
        sizes = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
        with made(name, kernels, dtype=mx.bfloat16, **sizes) as engine:
            runner = engine.core.runner
            runner.compiled = True
            if again:
                attach_graphs(runner, library, device)
            answers.append([[c.tokens for c in engine.generate(asked)] for _ in range(2)])
    assert answers[0] == answers[1] and not said and device.launched
    assert {"qmm", "add_norm"} <= set(kernels.used) and ("moe_grouped" in kernels.used) == (
        "-a" in name or name == "minimax-m2"
    )


def on_hybrids(run):
    """run(engine, device) on two engines of a hybrid, as it is and with steps that are launched again."""
    answers = []
    for again in (False, True):
        library, device = FakeLibrary(Simulator(checked=False)), Bench()
        with made("qwen3.5-9b", Kernels("strict", make_gpu("metal", library))) as engine:
            engine.core.runner.compiled = True
            if again:
                attach_graphs(engine.core.runner, library, device)
            answers.append(run(engine, device))
    return answers


def test_recurrent_states_go_from_tail_to_tail():
    """A tail that goes on takes the state the last one ended with, one of another request the state of its prompt."""
    first, second = (OTHER * 40)[:159], [i % 90 for i in range(159)]  # a step to the end of a block: one tail by MLX
    rounds = [[ask(first, 37, logprobs=1)], [ask(OTHER, 3), ask(second, 4)], [ask(second, 5, logprobs=1)]]

    def run(engine, device):
        found = [[(c.tokens, c.logprobs) for c in engine.generate(asked)] for asked in rounds]
        return found, device.launched

    (right, _), (found, launched) = on_hybrids(run)
    assert found == right  # log probabilities show what tokens of random weights would not
    assert launched == 31 + 3 + 4  # of the second tail, of what goes on from it, of the last request


@pytest.mark.parametrize("length", [155, 156])
def test_a_state_of_a_tail_that_ends_early_goes_on(length):
    """The first tail ends at a block's end, after 5 or 4 steps: in either of the two buffers."""
    prompts = [[(7 * i + n) % 90 for i in range(length)] for n in range(3)]

    def run(engine, device):
        for prompt in prompts[:2]:
            engine.generate([ask(prompt, 4, logprobs=1)])
        before = device.launched
        [last] = engine.generate([ask(prompts[2], 10, logprobs=1)])
        return (last.tokens, last.logprobs), device.launched - before, device.flushes

    (right, *_), (found, launched, flushes) = on_hybrids(run)
    assert found == right and launched == 9
    assert flushes == (length % 2 == 0)  # of an even number: the next tail begins with the first buffer


def test_a_tail_that_goes_on_in_a_wider_table_takes_its_state_along():
    """Both widths are known from other requests, so nothing is captured on the way, which would wait."""
    *others, prompt = [[(7 * i + n) % 90 for i in range(n)] for n in (100, 101, 130, 131, 96)]

    def run(engine, device):
        for other in others:
            engine.generate([ask(other, 3, logprobs=1)])
        before = device.launched
        [last] = engine.generate([ask(prompt, 36, logprobs=1)])
        return (last.tokens, last.logprobs), device.launched - before

    (right, _), (found, launched) = on_hybrids(run)
    assert found == right and launched == 35


@pytest.mark.slow  # most of it is compiling; the GPU tests have random programs, too
def test_requests_that_come_and_go(engines):
    """Rows of another number, of another length, of a prompt that is known."""
    longer = [i % 40 for i in range(130)]
    _, device, said = both(
        engines,
        [ask(PROMPT, 12)],
        [ask(OTHER, 12)],
        [ask(PROMPT, 18), ask(OTHER, 9), ask([7], 13)],
        [ask(OTHER, 14), ask([7], 11), ask(PROMPT, 17)],
        [ask(longer, 5)],
        [ask(PROMPT, 20), ask(OTHER, 12, temperature=0.9, seed=4)],
        [ask([*longer, 3], 6)],
        [ask([*PROMPT, 9], 26)],
        kv_memory="1MB",
    )
    assert device.launched > 60 and not said


HOT = {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 4}
PENALISED = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {3: 2.0}}


def test_greedy_and_drawn_rows_share_a_graph_and_log_probabilities_come_with_it(engines, folder):  # noqa: F811
    """Tails of 3 and 4 steps: penalties reach back into the one before. The truth is plain MLX, nothing simulated."""
    prompts = [[(7 * i + n) % 41 for i in range(29)] for n in (0, 1)]
    mixed = [ask(prompts[0], 8, logprobs=1), ask(prompts[1], 8, **PENALISED | HOT, logprobs=4)]
    with mlxrt.load(str(folder), mlxrt.EngineConfig(dequantise=False, max_context=512)) as plain:
        expected = plain.generate(mixed)
    engine, device, said = engines(True)
    for _ in range(2):
        for right, got in zip(expected, engine.generate(mixed), strict=True):
            assert got.tokens == right.tokens
            for a, b in zip(right.logprobs, got.logprobs, strict=True):
                assert [token for token, _ in a] == [token for token, _ in b]
                assert [x for _, x in a] == pytest.approx([x for _, x in b], abs=1e-4)
    assert {"draw", "top_logprobs"} <= set(engine.core.runner.model.kernels.used)
    assert device.launched >= 6 and not said


def test_pools_that_moved_are_followed(engines):
    answers = []
    for again in (False, True):
        engine, device, _ = engines(again)
        answers.append([engine.generate([ask(prompt, 8)])[0].tokens for prompt in (PROMPT, OTHER)])
        made = device.graphs
        engine.core.pools.arrays = {i: tuple(a + 0 for a in arrays) for i, arrays in engine.core.pools.arrays.items()}
        mx.eval(engine.core.pools.arrays)
        answers[-1] += [engine.generate([ask(tokens, 8)])[0].tokens for tokens in ([7], [*PROMPT, *answers[-1][0]])]
    assert answers[0] == answers[1] and device.graphs > made > 0


def test_first_tokens_are_given_before_the_next_step_is_launched(engines):
    """It may be captured first, which takes as long as many steps. Rows that were decoding go on at once instead."""
    engine, device, _ = engines(True)
    core = engine.core

    def step_until_first(*ids):
        events = {}
        while not events.keys() >= set(ids):
            core.step()
            events |= {id: found for id in ids if (found := engine.take(id))}
        return [len([e for e in events[id] if e.token is not None]) for id in ids]

    for prompt in (PROMPT, OTHER, [7]):
        first = engine.submit(ask(prompt, 8))
        assert step_until_first(first) == [1] and core.positions == len(prompt)
        later = engine.submit(ask([3, *prompt], 2))
        step_until_first(later)
        assert core.positions > len(prompt) + len([3, *prompt]) + 1
        while core.busy:
            core.step()
        core.positions = 0
        core.prefix_cache.clear()
    assert device.launched


def test_a_step_with_plain_mlx_in_it_is_left_to_mlx(engines):
    """As it is where a kernel is wrong on a machine."""
    for again in (False, True):
        engine, device, said = engines(again)
        engine.core.runner.model.kernels.disabled["embed_rows"] = "for a test"
        tokens = [engine.generate([ask(prompt, 6)])[0].tokens for prompt in (PROMPT, OTHER, [7])]
        if not again:
            plain = tokens
    assert tokens == plain and not device.launched
    [line] = said
    assert line.startswith("decode steps are launched kernel by kernel: ") and line.endswith(
        "reads what plain MLX makes of a step's arrays"
    )


def test_weights_that_moved_are_noticed(engines):
    """MLX moves what is read on the host: a graph would read what is free by then."""
    engine, device, _ = engines(True)
    plain = engines(False)[0]
    for prompt in (PROMPT, OTHER):
        engine.generate([ask(prompt, 10)])
    launched = device.launched
    assert launched
    for known in engine.core.runner.graphs.captured.values():
        known.at["constants"][0] += 64
    assert engine.generate([ask([7], 10)])[0].tokens == plain.generate([ask([7], 10)])[0].tokens
    assert not engine.core.runner.graphs.captured and device.launched == launched


def test_no_more_is_kept_than_allowed(engines, monkeypatch):
    monkeypatch.setattr(replay, "MAX_BYTES", 1000)
    _, device, said = both(engines, [ask(PROMPT, 8)], [ask(OTHER, 8)])
    assert not device.launched and "kernel by kernel" in said[-1] and "1 rows would keep" in said[-1]


def test_what_comes_once_is_not_recorded(engines, monkeypatch):
    monkeypatch.setattr(replay, "WARMUP_STEPS", 8)
    engine, device, _ = engines(True)
    launched = []
    for prompt in (PROMPT, OTHER, [7]):
        engine.generate([ask(prompt, 6)])  # five steps
        launched.append(device.launched)
    assert launched[:2] == [0, 0] and launched[2] >= 4


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_at_once_lies_apart(seed):
    """Launches that read and write arrays at random, some through a view within one, some arrays read again late."""
    random = Random(seed)
    sizes, launches, first, last = {}, [], {}, {}
    for n in range(40):
        made = [(len(sizes) + 1 + i) * 100_000 for i in range(random.choice((1, 1, 2)))]
        read = random.sample(list(sizes)[-4:], min(len(sizes), random.randint(1, 3)))
        read += random.sample(list(sizes), min(len(sizes), random.random() < 0.2))
        sizes |= {start: random.choice((1, 8, 500, 4096, 70_000)) for start in made}
        launches.append([*(start + random.randrange(sizes[start]) for start in read), *made, 7])  # 7 is another's
        first |= dict.fromkeys(made, n)
        last |= dict.fromkeys([*read, *made], n)
    offsets, total = replay.share_memory(launches, sizes)
    assert set(offsets) == {at for launch in launches for at in launch} - {7}
    assert all(offsets[at] - offsets[at // 100_000 * 100_000] == at % 100_000 for at in offsets)
    for a, b in combinations(sizes, 2):
        if first[b] <= last[a] and first[a] <= last[b]:
            assert offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
    assert total == max(offsets[start] + size for start, size in sizes.items()) < sum(sizes.values())


def test_steps_of_as_many_rows_share_the_buffers_of_their_tails(engines):
    """Greedy and drawn steps, in turns and through several tails: each finds what the other left there overwritten."""
    greedy, drawn = [ask(PROMPT, 8), ask(OTHER, 8)], [ask(OTHER, 8, **HOT), ask(PROMPT, 8, **HOT)]
    engine, device, said = both(engines, greedy, drawn, greedy, drawn)
    steps = list(engine.core.runner.graphs.captured.values())
    assert len(steps) >= 2 and device.launched > 10 and not said
    assert len({id(step.tail) for step in steps}) == len({step.tokens.shape for step in steps})


def test_a_step_that_had_to_go_is_not_captured_again_at_once(engines, monkeypatch):
    """Two kinds in turns with room for one would else be captured at every turn, which takes longer than it saves."""
    monkeypatch.setattr(replay, "WARMUP_STEPS", 8)
    engine, device, _ = engines(True)
    graphs, greedy, drawn = engine.core.runner.graphs, ask(PROMPT, 6), ask(OTHER, 6, **HOT)
    for _ in range(3):
        engine.generate([greedy])
    [step] = graphs.captured.values()
    graphs.max_bytes = replay.count_bytes([step]) + step.nbytes // 2
    for _ in range(3):
        engine.generate([drawn])
    [left] = graphs.captured.values()
    assert left is not step
    launched = device.launched
    engine.generate([greedy])
    assert device.launched == launched and list(graphs.captured.values()) == [left]


def test_a_request_given_up_in_the_middle_of_a_tail(engines):
    answers = []
    for again in (False, True):
        engine, device, _ = engines(again)
        engine.generate([ask(PROMPT, 6)])
        with engine.stream([ask(OTHER, 30)]) as stream:
            given = [next(stream).token for _ in range(9)]
        answers.append((given, engine.generate([ask([*OTHER, *given], 12)])[0].tokens))
    assert answers[0] == answers[1] and device.launched


def test_graphs_can_be_switched_off_and_are_refused_where_there_are_none(monkeypatch):
    model, opened = KINDS["full"](), []
    monkeypatch.setattr(ModelRunner, "_open_graphs", lambda self, most: opened.append(most))
    for graphs in (None, False):
        mlxrt.Engine(model, mlxrt.EngineConfig(compile=True, cuda_graphs=graphs)).close()
    assert len(opened) == 1 and opened[0] > 0
    with pytest.raises(mlxrt.BadRequest, match="cuda_graphs does not apply: this device is cpu"):
        mlxrt.Engine(model, mlxrt.EngineConfig(cuda_graphs=True))
    with pytest.raises(mlxrt.BadRequest, match="cuda_graphs does not apply with compile off"):
        mlxrt.EngineConfig(cuda_graphs=True, compile=False)
    with pytest.raises(mlxrt.BadRequest, match="cuda_graphs must be True or False, not 'x'"):
        mlxrt.EngineConfig(cuda_graphs="x")
