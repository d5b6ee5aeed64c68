"""Decode steps on a CPU that run from their records: the tokens of steps that MLX runs, whatever the rows do."""

import threading
from pathlib import Path

import mlx.core as mx
import pytest

import mlxrt
from mlxrt.cache.memory import PagedKV
from mlxrt.engine.cpu_step import StepRecorder
from mlxrt.kernels import device

from ..support.kernels.cpu_library import compiled_library
from ..support.log_lines import capture_log
from ..support.tiny_files import CONFIG, float_weights, write_folder, write_gguf

pytestmark = pytest.mark.xdist_group("cpu_kernels")  # one worker compiles the library

PROMPTS = [[3, 14, 15, 9, 2, 6], [41, 5], [7, 7, 30, 1, 2, 3, 4, 8, 19, 22, 40], [11], [5, 6, 7]]
LENGTHS = [40, 7, 70, 33, 1]  # rows leave at different steps; tails are flushed in between
FAMILIES = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 16,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    return compiled_library()


def write_model(folder: Path, family: str, head_dim: int = 16) -> str:
    config = CONFIG | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
    }
    config |= {"model_type": family, **FAMILIES[family]}
    arrays = {}
    weights = float_weights(config, seed=7)
    if family == "gemma2":
        for i in range(config["num_hidden_layers"]):
            norm = weights[f"model.layers.{i}.input_layernorm.weight"]
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                weights[f"model.layers.{i}.{name}.weight"] = norm
        weights.pop("lm_head.weight", None)
    for name, array in weights.items():
        if array.ndim == 1:
            arrays[name] = mx.array(array)
            continue
        size = 0.02 if family == "gemma2" and "embed" in name else 0.3  # its logits are capped
        parts = mx.quantize((mx.array(array) * size).astype(mx.float16), 32, 8 if "embed" in name else 4)
        arrays |= dict(zip((name, name.replace("weight", "scales"), name.replace("weight", "biases")), parts))
    return str(write_folder(folder, arrays, config))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), request.param)


def replays(engine) -> int:
    return sum(s.replays for s in (engine.core.runner.decode_fn, engine.core.runner.sample_fn))


def answer(folder, recorded: bool, max_kv_size: int | None = None, kv: str = "full", **params) -> list[tuple[int, ...]]:
    with mlxrt.load(folder, max_kv_size=max_kv_size, kv=kv) as engine:
        runner = engine.core.runner
        assert isinstance(runner.sample_fn, StepRecorder) and isinstance(runner.decode_fn, StepRecorder)
        if not recorded:
            runner.sample_fn, runner.decode_fn = runner.sample_step, runner.decode_step
        requests = [
            mlxrt.Request(tokens=tuple(p), params=mlxrt.SamplingParams(max_tokens=n, ignore_eos=True, **params))
            for p, n in zip(PROMPTS, LENGTHS)
        ]
        done = engine.generate(requests)
        assert not recorded or replays(engine) > 50
        return [c.tokens for c in done]


def test_a_flush_that_is_late_reads_what_its_tail_held(folder, monkeypatch):
    """Flushes are computed in the background, and the next step begins its tails in the same memory."""
    expected = answer(folder, recorded=False)
    flush, slow = PagedKV.flush, mx.ones((900, 900))

    def flush_late(spec, pool, live, *rest):
        zero = (slow @ slow @ slow)[0, 0] * 0
        return flush(spec, pool, tuple(t + zero for t in live), *rest)

    monkeypatch.setattr(PagedKV, "flush", flush_late)
    assert answer(folder, recorded=True) == expected


SAMPLING = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0, "seed": 5},
    "cut": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    "penalised": {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    "greedy, penalised": {"temperature": 0.0, "presence_penalty": 1.5},
    "biased": {"temperature": 0.8, "seed": 5, "logit_bias": {3: 2.0}, "suppress": (4, 5)},
    "log probabilities": {"temperature": 1.0, "seed": 5, "logprobs": 3},
}


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
def test_tokens_are_those_of_steps_that_are_not_recorded(folder, params):
    assert answer(folder, True, **params) == answer(folder, False, **params)


def test_rows_that_are_sampled_in_different_ways_are_recorded(folder):
    """The tokens that each gets alone from plain MLX."""
    requests = [
        mlxrt.Request(tokens=tuple(p), params=mlxrt.SamplingParams(max_tokens=n, ignore_eos=True, **params))
        for (p, n), params in zip(zip(PROMPTS, LENGTHS), list(SAMPLING.values())[2:])
    ]
    with mlxrt.load(folder, kernels="reference") as plain:
        want = [plain.generate(request) for request in requests]
    with mlxrt.load(folder) as engine:
        done = engine.generate(requests)
        assert replays(engine) > 50
    assert [c.tokens for c in done] == [c.tokens for c in want]
    for one, other in zip(done, want):
        pairs = [pair for a, b in zip(one.logprobs, other.logprobs) for pair in zip(a, b)]
        assert all(a == c and abs(b - d) < 1e-4 for (a, b), (c, d) in pairs)


def test_rows_with_a_callback_are_sampled_beside_the_others(folder):
    seen = []
    params = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 5, "top_k": 10}
    called = mlxrt.Request(tokens=(41, 5), params=mlxrt.SamplingParams(**params), on_logits=lambda row: seen.append(1))
    drawn = mlxrt.Request(tokens=(7, 7, 30), params=mlxrt.SamplingParams(**params))
    with mlxrt.load(folder) as engine:
        alone = [engine.generate(request).tokens for request in (called, drawn)]
        together = [c.tokens for c in engine.generate([called, drawn])]
    assert together == alone and len(seen) == 60


def test_a_window_with_kept_tokens_is_recorded(folder):
    """In blocks of 32 tokens, the longest row leaves the second one behind."""
    with mlxrt.load(folder, max_kv_size=12, kernels="reference") as plain:
        assert plain.core.runner.model.kernels.cpu is None
        done = [plain.generate(tuple(p), max_tokens=n, ignore_eos=True).tokens for p, n in zip(PROMPTS, LENGTHS)]
    assert answer(folder, recorded=True, max_kv_size=12, temperature=0.0) == done
    long = tuple(i * 5 % 40 for i in range(140))
    with mlxrt.load(folder, max_kv_size=12, kernels="reference") as plain, mlxrt.load(folder, max_kv_size=12) as engine:
        want = plain.generate(long, max_tokens=40, ignore_eos=True).tokens
        assert engine.generate(long, max_tokens=40, ignore_eos=True).tokens == want and replays(engine)
        assert any(part.first for part in engine.core.prefix_cache.resume((*long, *want)).parts)


def test_a_step_with_ops_of_mlx_runs_as_before(folder):
    said = capture_log()
    with mlxrt.load(folder) as engine:
        want = engine.generate([PROMPTS[0]], max_tokens=20, temperature=0.0, ignore_eos=True)[0].tokens
    with mlxrt.load(folder) as engine:
        inner = engine.model.logits
        engine.core.runner.model.logits = lambda hidden: inner(hidden) + 0.0  # an op of MLX after the kernels
        got = engine.generate([PROMPTS[0]], max_tokens=20, temperature=0.0, ignore_eos=True)[0].tokens
        assert got == want and replays(engine) == 0
    assert sum("call by call" in line for line in said) == 1


def test_values_of_another_type_than_keys_are_recorded(tmp_path):
    """As in half of the layers of a Q4_K_M file: three products then make what attention reads."""
    config = CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    kinds = {f"model.layers.{i}.self_attn.v_proj.weight": "Q8_0" for i in range(config["num_hidden_layers"])}
    path = str(write_gguf(tmp_path / "mixed.gguf", float_weights(config, seed=7), config, "Q4_1", kinds=kinds))
    with mlxrt.load(path, kernels="reference") as plain:
        want = [plain.generate(tuple(p), max_tokens=20, temperature=0.0, ignore_eos=True).tokens for p in PROMPTS]
    with mlxrt.load(path) as engine:
        assert engine.core.runner.model.kernels.cpu is not None
        done = engine.generate([tuple(p) for p in PROMPTS], max_tokens=20, temperature=0.0, ignore_eos=True)
        assert [c.tokens for c in done] == want and replays(engine) >= 18


def test_rows_that_leave_a_prompt_together_are_recorded(folder):
    """They take the tokens as the prompt's step made them: a column of a wider array."""
    requests = [(3, 14, 15, 9, 2, i) for i in range(4)]
    with mlxrt.load(folder) as engine:
        done = engine.generate(requests, max_tokens=12, temperature=0.0, ignore_eos=True)
        assert replays(engine) == 10  # but for the prompt's own token, and the step that is recorded
    with mlxrt.load(folder, kernels="reference") as plain:
        want = [plain.generate(r, max_tokens=12, temperature=0.0, ignore_eos=True).tokens for r in requests]
    assert [c.tokens for c in done] == want


def test_engines_on_two_threads_share_the_threads_of_the_kernels(folder):
    alone = answer(folder, True, temperature=0.0)
    found: dict[int, list] = {}

    def work(i: int) -> None:
        found[i] = answer(folder, True, temperature=0.0)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {0: alone, 1: alone}


def test_a_conversation_goes_on_where_it_ended(folder):
    """The tail that a recorded step wrote in place is what the prefix cache keeps."""
    with mlxrt.load(folder) as engine:
        first = engine.generate([PROMPTS[2]], max_tokens=40, temperature=0.0, ignore_eos=True)[0].tokens
        longer = [*PROMPTS[2], *first, 9, 8]
        again = engine.generate([longer], max_tokens=20, temperature=0.0, ignore_eos=True)[0]
        assert again.cached_tokens > 0
    with mlxrt.load(folder, prefix_cache=False) as engine:
        assert engine.generate([longer], max_tokens=20, temperature=0.0, ignore_eos=True)[0].tokens == again.tokens


def test_a_prompt_does_not_copy_the_pools(tmp_path):
    """CPU kernels compute at once, while the prompt's layers are still being gone through."""
    with mlxrt.load(write_model(tmp_path, "llama")) as engine:
        engine.core.pools.groups[0].pool.size = 4096  # blocks, for which there are no requests yet
        engine.core.pools.apply_pending()
        held = sum(array.nbytes for arrays in engine.core.pools.arrays.values() for array in arrays)
        engine.generate(PROMPTS[0], max_tokens=1)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine.generate(PROMPTS[2], max_tokens=1)
        assert held > 16 << 20 and mx.get_peak_memory() - before < held / 4


def test_an_idle_engine_gives_buffers_back(tmp_path, monkeypatch):
    """Once, after the last token of the last request."""
    released = []
    monkeypatch.setattr(device, "IDLE_CACHE", -1)
    with mlxrt.load(write_model(tmp_path, "llama")) as engine:
        monkeypatch.setattr(device, "release_cache", lambda: released.append(engine.core.busy))
        engine.generate([PROMPTS[0], PROMPTS[1]], max_tokens=5)
        assert released == [False]
        monkeypatch.setattr(device, "IDLE_CACHE", 1 << 40)
        engine.generate(PROMPTS[2], max_tokens=2)
        assert released == [False]
