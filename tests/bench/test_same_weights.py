"""A shape's random weights put into mlx-lm's module: the same model, so the same logits."""

import mlx.core as mx
import pytest

import mlxrt
from mlxrt.bench.backends.mlx_lm import MlxLmBackend, our_name
from mlxrt.weights.random_models import published_configs

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
PROMPT = [(7 * i * i + 3) % 300 for i in range(24)]


@pytest.fixture
def tiny(monkeypatch):
    def make(base, **more):
        monkeypatch.setitem(published_configs(), "tiny", published_configs()[base] | SMALL | more)

    return make


@pytest.mark.parametrize("bits", ["", "@4bit"])
@pytest.mark.parametrize(
    ("base", "more"),
    [("smollm2-135m", {}), ("qwen3-0.6b", {}), ("qwen3-30b-a3b", EXPERTS)],
    ids=["llama", "qwen3", "moe"],
)
def test_mlx_lm_computes_the_same_logits(tiny, base, more, bits):
    tiny(base, **more)
    name = f"shape:tiny{bits}"
    backend = MlxLmBackend({"shape": name})
    with mlxrt.load(name) as engine:
        ours = engine.score(PROMPT)
        theirs = backend.model(mx.array(PROMPT)[None])[0]
        assert ours.dtype == mx.float32 and mx.abs(ours).max().item() > 0.1
        assert mx.abs(ours - theirs).max().item() < 2e-3
        reply = backend.reply({"do": "generate", "prompt": PROMPT, "max_tokens": 6})
        assert reply["tokens"] == list(engine.generate(PROMPT, max_tokens=6).tokens)
        assert len(reply["at"]) == len(reply["used"]) == 6 and reply["cached"] == 0


def test_mlx_lm_keeps_and_trims_its_cache(tiny):
    tiny("qwen3-0.6b")
    backend = MlxLmBackend({"shape": "shape:tiny"})
    cold = backend.generate(PROMPT, 5)
    again = backend.generate(PROMPT, 5, fresh=False)
    edited = [*PROMPT[:15], 1, 2, 3]
    warm = backend.generate(edited, 5, fresh=False)
    assert again["cached"] == len(PROMPT) - 1 and warm["cached"] == 15
    assert again["tokens"] == cold["tokens"] and warm["tokens"] == backend.generate(edited, 5)["tokens"]
    longer = [*PROMPT, *cold["tokens"], 9, 9]
    restarted = backend.restart(PROMPT, longer, 4)
    assert restarted["cached"] == len(PROMPT) and restarted["tokens"] == backend.generate(longer, 4)["tokens"]


def test_mlx_lm_batches_give_the_tokens_of_single_requests(tiny):
    tiny("qwen3-0.6b")
    backend = MlxLmBackend({"shape": "shape:tiny"})
    asked = [{"prompt": PROMPT[:n], "max_tokens": 4, "after": 0.002 * n} for n in (5, 11, 23)]
    rows = backend.batch(asked)["rows"]
    assert [row["tokens"] for row in rows] == [backend.generate(a["prompt"], 4)["tokens"] for a in asked]
    assert all(row["at"] == sorted(row["at"]) and row["at"][0] >= 0 for row in rows)


def test_mlx_lm_serves_late_requests_beside_a_stream(tiny):
    tiny("qwen3-0.6b")
    backend = MlxLmBackend({"shape": "shape:tiny"})
    requests = [{"prompt": PROMPT[:n], "max_tokens": m, "late": n != 9} for n, m in ((9, 20), (20, 4), (5, 4))]
    reply = backend.serve(requests, 3)
    expected = [backend.generate(r["prompt"], r["max_tokens"])["tokens"] for r in requests]
    assert [row["tokens"] for row in reply["rows"]] == expected
    assert reply["positions"] >= 34 and reply["stall"] > 0 and reply["held"] > 0


def test_a_module_with_other_tensors_is_refused_by_name(tiny, monkeypatch):
    tiny("qwen3-0.6b")
    monkeypatch.setattr("mlxrt.bench.backends.mlx_lm.our_name", lambda name: our_name(name).replace("norm", "form"))
    with pytest.raises(mlxrt.UnsupportedModel, match=r"form|norm"):
        MlxLmBackend({"shape": "shape:tiny"})
