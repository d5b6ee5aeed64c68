"""Models that mlx-lm computes, behind our engine: the same greedy tokens as its own loop, alone, in batches, reused."""

import json
from functools import cache

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlxrt
from mlxrt import EngineConfig, Request, SamplingParams
from mlxrt.cache import BlockPool
from mlxrt.cache.external import ExternalState
from mlxrt.engine.engine import Engine
from mlxrt.errors import BadCheckpoint, BadRequest, BadSnapshot, CannotRewind, NoRoom, UnsupportedModel, WontFit
from mlxrt.models import FAMILIES, find
from mlxrt.models.mlx_lm_adapter import MlxLm, trim_limit

from ..support.log_lines import capture_log
from .mlx_lm_configs import VOCAB, tiny

# Every cache of every layer can be cut: any stored prefix is reused.
PLAIN = """cohere deepseek deepseek_v3 dots1 ernie4_5 exaone gemma glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite
    granitemoe helium hunyuan_v1_dense internlm2 internlm3 llama4_text mimo minicpm nemotron olmo2 phi phimoe
    seed_oss smollm3 stablelm starcoder2""".split()
# A window among them: only while it is not full. Then, as with a running summary, only where a request ended.
WINDOWED = "cohere2 exaone4 olmo3".split()
RECURRENT = "falcon_h1 jamba lfm2 mamba mamba2 recurrent_gemma rwkv7".split()
BUDGET = EngineConfig(kv_memory="64M", ahead=0)


@cache
def model(kind: str) -> MlxLm:
    config = tiny(kind)
    made = MlxLm(MlxLm.parse(config))
    assert sum(array.size for _, array in tree_flatten(made.parameters())) < 3_000_000
    mx.random.seed(7)

    def draw(old: mx.array) -> mx.array:
        """Wide enough that the answers vary; vectors (norms, decays) stay as they are built."""
        return 0.3 * mx.random.normal(old.shape) if old.ndim > 1 else old

    made.update(tree_map(draw, made.parameters()))
    mx.eval(made.parameters())
    return made


def truth(kind: str, prompt, n: int) -> tuple[int, ...]:
    return tuple(int(token) for token, _ in generate_step(mx.array(prompt), model(kind).module, max_tokens=n))


def quiet(kind: str, config: EngineConfig = BUDGET) -> Engine:
    return Engine(model(kind), config)


PROMPT = (3, 5, 7, 9, 11, 13, 2, 4, 6, 8, 33, 44, 55)


@pytest.mark.parametrize("kind", PLAIN + WINDOWED + RECURRENT)
def test_greedy_tokens_are_mlx_lms(kind):
    assert kind not in FAMILIES and find(tiny(kind)) is MlxLm
    with quiet(kind) as engine:
        first = engine.generate(list(PROMPT), max_tokens=10)
        assert first.tokens == truth(kind, PROMPT, 10) and first.cached_tokens == 0
        turn = (*PROMPT, *first.tokens, 40, 41, 42)
        second = engine.generate(list(turn), max_tokens=6)
        assert second.tokens == truth(kind, turn, 6)
        assert second.cached_tokens == len(PROMPT) + 9  # the last token of the answer was never fed
        edited = (*turn[:10], 1, 2, 3)
        third = engine.generate(list(edited), max_tokens=6)
        assert third.tokens == truth(kind, edited, 6)
        assert third.cached_tokens == (10 if kind in PLAIN else 0)
        rows = [(1, 2, 3), (9,) * 17, (4, 5, 6, 7, 8, 50), (60,)]
        params = SamplingParams(max_tokens=5)
        batch = engine.generate([Request(tokens=row, params=params) for row in rows])
        assert [c.tokens for c in batch] == [truth(kind, row, 5) for row in rows]


@pytest.mark.parametrize("kind", ["olmo2", "olmo3", "mamba2", "jamba"])
def test_logits_do_not_depend_on_chunks(kind):
    tokens = [(7 * i + 3) % VOCAB for i in range(21)]
    module = model(kind).module
    whole = module(mx.array([tokens]), cache=make_prompt_cache(module))[0]
    with quiet(kind) as engine:
        for chunk in (None, 1, 4):
            assert mx.abs(engine.score(tokens, chunk) - whole).max().item() < 2e-4 * mx.abs(whole).max().item()


@pytest.mark.parametrize("kind", ["olmo2", "cohere2", "falcon_h1"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_many_replies_forks_and_little_memory(kind, ahead):
    """Conversations that branch from one another, in a cache so small that stored prefixes are evicted."""
    spec = model(kind).cache_specs()[0]
    config = EngineConfig(kv_memory=spec.unit * (3 * spec.base + 9), ahead=ahead, chunk=8, max_running=3)
    with quiet(kind, config) as engine:
        prompts = [list(PROMPT)]
        for turn in range(6):
            asked = [[*prompts[-1], 10 + turn], [*prompts[-1][: 9 + turn], 60 + turn], [turn, *PROMPT[:4]]]
            params = SamplingParams(max_tokens=4)
            answers = engine.generate([Request(tokens=tuple(t), params=params) for t in asked])
            assert [a.tokens for a in answers] == [truth(kind, t, 4) for t in asked]
            prompts.append([*asked[0], *answers[0].tokens])
        stats = engine.stats()
        assert stats.evictions > 0 and stats.kv_bytes <= stats.kv_limit


def test_a_stop_token_in_the_middle_keeps_an_exact_prefix():
    for kind, ahead in (("olmo2", 1), ("mamba", 0)):
        answer = truth(kind, PROMPT, 8)
        stop = answer[4]
        n = answer.index(stop) + 1
        with quiet(kind, EngineConfig(kv_memory="64M", ahead=ahead)) as engine:
            first = engine.generate(list(PROMPT), max_tokens=8, stop_token_ids=(stop,))
            assert first.tokens == answer[:n]
            turn = (*PROMPT, *first.tokens, 77)
            second = engine.generate(list(turn), max_tokens=8)
            assert second.tokens == truth(kind, turn, 8)
            assert second.cached_tokens >= len(PROMPT) + n - 1


def test_a_summary_is_kept_at_strides(monkeypatch):
    spec = model("mamba").cache_specs()[0]
    config = EngineConfig(kv_memory="64M", ahead=0, chunk=spec.stride)
    text = [(5 * i + 1) % VOCAB for i in range(spec.stride + 40)]
    with quiet("mamba", config) as engine:
        engine.generate(text, max_tokens=2)
        other = [*text[: spec.stride + 9], 3, 3, 3]
        again = engine.generate(other, max_tokens=5)
        assert again.cached_tokens == spec.stride and again.tokens == truth("mamba", other, 5)


def test_memory_follows_what_mlx_lm_holds():
    """The blocks a sequence takes are worth at least the bytes of its caches."""
    for kind in ("olmo2", "jamba", "mamba"):
        spec, module = model(kind).cache_specs()[0], model(kind).module
        for n in (1, 40, 300):
            caches = make_prompt_cache(module)
            module(mx.zeros((1, n), mx.uint32), cache=caches)
            state = spec.empty(BlockPool(1000)).grow(n)
            assert len(state.blocks) * spec.nbytes() >= sum(c.nbytes for c in caches), (kind, n)


def test_closing_frees_every_cache():
    with quiet("olmo2") as engine:
        engine.generate(list(PROMPT), max_tokens=3)
        assert len(engine.core.pools.groups[0].spec.caches) == 1  # the stored prefix
    assert len(engine.core.pools.groups[0].spec.caches) == 0 and engine.core.pools.groups[0].pool.used == 0


def test_what_cannot_be_done_is_said():
    assert "one after another" in model("olmo2").describe() and "any stored prefix" in model("olmo2").describe()
    assert "shorter than 8 tokens" in model("cohere2").describe()
    assert "where a request ended" in model("mamba").describe()
    assert "how the prompt was cut" in model("plamo3").describe() and "was cut" not in model("olmo2").describe()
    with quiet("olmo2") as engine:
        engine.generate(list(PROMPT), max_tokens=2)
        with pytest.raises(BadSnapshot, match="mlx-lm"):
            engine.core.pools.read(engine.state([*PROMPT]))
    with pytest.raises(BadRequest, match="kv q8"):
        quiet("olmo2", EngineConfig(kv="q8"))
    with pytest.raises(WontFit):
        quiet("olmo2", EngineConfig(kv_memory=1000))


def test_caches_that_only_call_themselves_trimmable_are_not_cut():
    from mlx_lm.models.cache import CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

    assert trim_limit([KVCache(), RotatingKVCache(20), CacheList(RotatingKVCache(12), KVCache())]) == 12
    assert trim_limit([KVCache(), ChunkedKVCache(8)]) == 0 == trim_limit([ConcatenateKVCache()])


# The host's side


def test_the_only_reference_appends_and_others_copy():
    pool = BlockPool(100)
    a = ExternalState(pool, size=4, base=2).grow(6)
    assert len(a.blocks) == 4
    b = a.grow(3)
    assert b.ref is a.ref and pool.used == 5
    fork = b.truncate(7)
    c, d = b.grow(1), fork.grow(2)
    assert c.ref is not b.ref and c.source is b.ref and (d.start, d.length) == (7, 9)
    del a, b, fork
    e = d.grow(1)  # the place both came from is d's no longer: it wrote to its own
    assert e.ref is d.ref
    del c, d, e
    assert pool.used == 0


def test_a_full_cache_exists_at_one_length():
    pool = BlockPool(50)
    state = ExternalState(pool, size=4, limit=8).grow(7)
    assert state.rewind(3).length == 3
    state = ExternalState(pool, size=4, limit=8).grow(9)
    assert state.floor == 9
    with pytest.raises(CannotRewind):
        state.rewind(8)
    with pytest.raises(NoRoom):
        state.grow(500)
    assert state.length == 9 and state.ref.slot.length == 9


# From files


def write(folder, kind: str, **changes):
    from mlx_lm.utils import save_model

    save_model(folder, model(kind).module)
    (folder / "config.json").write_text(json.dumps(tiny(kind) | changes))
    (folder / "model.safetensors.index.json").unlink()
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "mamba2", "granitemoe"])
def test_a_folder_loads_and_answers(tmp_path, kind):
    lines = capture_log()
    with mlxrt.load(str(write(tmp_path, kind)), EngineConfig(kv_memory="64M")) as engine:
        assert engine.generate(list(PROMPT), max_tokens=8).tokens == truth(kind, PROMPT, 8)
        assert engine.config.ahead == (0 if kind == "mamba2" else 1)
    assert any("runs through mlx-lm" in line for line in lines)


def test_a_packed_folder_stays_packed_and_equals_mlx_lm(tmp_path):
    import mlx.nn as nn
    from mlx_lm.utils import load_model, save_model

    made = MlxLm(MlxLm.parse(tiny("granitemoe")))
    nn.quantize(made.module, 32, 4)
    save_model(tmp_path, made.module)
    (tmp_path / "model.safetensors.index.json").unlink()
    config = tiny("granitemoe") | {"quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs, _ = load_model(tmp_path)
    expected = tuple(int(t) for t, _ in generate_step(mx.array(PROMPT), theirs, max_tokens=8))
    for dequantise in (False, True):
        with mlxrt.load(str(tmp_path), EngineConfig(kv_memory="64M", dequantise=dequantise)) as engine:
            assert engine.generate(list(PROMPT), max_tokens=8).tokens == expected
            experts = engine.model.module.layers[0].block_sparse_moe.switch_mlp.up_proj
            assert (experts.weight.dtype == mx.uint32) is not dequantise


def test_bad_configs_and_files_are_typed(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"llama.*mlx-lm .* has it not"):
        find({"model_type": "nothing_has_this"})
    for kind in ("cache", "base", "../utils", "os", "x" * 99, ""):
        with pytest.raises(UnsupportedModel):
            find({"model_type": kind})
    folder = write(tmp_path, "olmo2")
    for change in (
        {"hidden_size": "x"}, {"num_attention_heads": 0}, {"num_hidden_layers": 10**9}, {"vocab_size": -1},
        {"vocab_size": None}, {"rope_scaling": {"type": "odd"}}, {"hidden_size": 63}, {"vocab_size": VOCAB + 1},
        {"intermediate_size": 95}, {"num_hidden_layers": 3},
    ):  # fmt: skip
        (folder / "config.json").write_text(json.dumps(tiny("olmo2") | change))
        with pytest.raises((BadCheckpoint, UnsupportedModel)):
            mlxrt.load(str(folder))
    (folder / "config.json").write_text(json.dumps(tiny("olmo2") | {"model_file": "evil.py"}))
    with pytest.raises(UnsupportedModel, match="run code"):
        mlxrt.load(str(folder))
