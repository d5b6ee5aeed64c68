"""mlxrt's backend against plain calls of the engine, and numpy in float64."""

import mlx.core as mx
import numpy as np
import pytest

import mlxrt
from mlxrt.bench.backends.mlxrt import MlxrtBackend
from mlxrt.bench.corpus import MAX_CHARACTERS, Prompts, random_prompts, read_corpus

PROMPT = [(5 * i * i + 11) % 250 for i in range(40)]


@pytest.fixture
def ours(folder):
    backend = MlxrtBackend({"model": str(folder)})
    yield backend
    for engine in backend.engines.values():
        engine.close()


def generate_alone(backend, prompt, n):
    backend.first.core.prefix_cache.clear()
    return list(backend.first.generate(list(prompt), max_tokens=n, ignore_eos=True).tokens)


def test_fresh_computes_everything_and_the_rest_reuses(ours):
    cold = ours.reply({"do": "generate", "prompt": PROMPT, "max_tokens": 5})
    warm = ours.reply({"do": "generate", "prompt": PROMPT, "max_tokens": 5, "fresh": False})
    again = ours.reply({"do": "generate", "prompt": PROMPT, "max_tokens": 5, "fresh": True})
    assert cold["cached"] == again["cached"] == 0 and warm["cached"] == len(PROMPT) - 1
    assert cold["tokens"] == warm["tokens"] == again["tokens"] == generate_alone(ours, PROMPT, 5)
    for clock in ("at", "used"):
        assert len(cold[clock]) == 5 and cold[clock] == sorted(cold[clock]) and cold[clock][0] > 0


def test_batch_as_it_arrives_gives_the_tokens_of_single_requests(ours):
    asked = [{"prompt": PROMPT[:n], "max_tokens": 4, "after": 0.002 * n} for n in (30, 4, 17)]
    reply = ours.reply({"do": "batch", "requests": asked})
    assert [row["tokens"] for row in reply["rows"]] == [generate_alone(ours, a["prompt"], 4) for a in asked]
    assert all(row["at"] == sorted(row["at"]) and row["at"][0] > 0 for row in reply["rows"])
    assert reply["seconds"] >= 0.06


def test_serve_lets_late_requests_arrive_beside_a_stream(ours):
    requests = [{"prompt": PROMPT[:n], "max_tokens": m, "late": n != 9} for n, m in ((9, 20), (30, 4), (5, 4))]
    reply = ours.reply({"do": "serve", "requests": requests, "after": 3})
    expected = [generate_alone(ours, r["prompt"], r["max_tokens"]) for r in requests]
    assert [row["tokens"] for row in reply["rows"]] == expected
    assert reply["positions"] >= 44 and 0 < reply["stall"] <= reply["stall_bound"]
    assert reply["held"] > 0 and reply["held_tokens"] > 44


def test_restart_reads_what_was_left_on_disk(ours):
    longer = [*PROMPT, 7, 8, 9]
    reply = ours.reply({"do": "restart", "history": PROMPT, "prompt": longer, "max_tokens": 4})
    assert reply["cached"] >= 32 and reply["tokens"] == generate_alone(ours, longer, 4)


def test_gap_is_that_of_the_logits(ours):
    logits = ours.first.score(PROMPT)[-1]
    assert ours.reply({"do": "gap", "prompt": PROMPT, "pair": [3, 90]}) == pytest.approx(
        (logits[3] - logits[90]).item()
    )


def test_losses_are_those_of_a_softmax_in_float64(ours):
    windows = [PROMPT[:20], PROMPT[20:]]
    found = ours.reply({"do": "losses", "windows": windows, "first": 11})
    want, best = [], []
    for tokens in windows:
        logits = np.array(ours.first.score(tokens), np.float64)
        for place in range(11, 20):
            row = logits[place - 1]
            want.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[tokens[place]])
            best.append(int(row.argmax()))
    assert found["losses"] == pytest.approx(want, abs=1e-4) and found["best"] == best


def test_quantized_weights_are_dequantized_ones(ours, folder):
    """Embedding and head have 32 columns, less than a group of 64; only mlp.down_proj has whole groups."""
    model = ours.quantize_weights(4)
    plain = mx.load(str(folder.path / "model.safetensors"))["model.layers.1.mlp.down_proj.weight"]
    got = model.model.layers[1].mlp.down_proj.weight
    assert mx.array_equal(got, mx.dequantize(*mx.quantize(plain, 64, 4), 64, 4)) and not mx.array_equal(got, plain)
    found = ours.reply({"do": "losses", "windows": [PROMPT], "first": 5, "config": {"weight_bits": 2}})
    assert found["losses"] != ours.reply({"do": "losses", "windows": [PROMPT], "first": 5})["losses"]


def test_one_configuration_is_one_engine(ours):
    assert ours.engine({}) is ours.first and ours.engine({"chunk": 8}) is ours.engine({"chunk": 8})
    assert ours.engine({"chunk": 8}).model is ours.first.model
    with pytest.raises(mlxrt.UnsupportedModel, match="head_dim 8"):
        ours.engine({"kv": "q8"})


def test_a_submitted_request_is_taken_event_by_event(folder):
    with mlxrt.load(str(folder)) as engine:
        want = engine.generate(PROMPT, max_tokens=5, ignore_eos=True).tokens
        id = engine.submit(
            mlxrt.Request(tokens=tuple(PROMPT), params=mlxrt.SamplingParams(max_tokens=5, ignore_eos=True))
        )
        assert engine.take(id) == []
        events = []
        while not events or events[-1].finish_reason is None:
            assert engine.step()
            events += engine.take(id)
        assert (
            tuple(e.token for e in events if e.token is not None) == want and events[-1].timings.generated_tokens == 5
        )
        with pytest.raises(mlxrt.BadRequest, match="no events of request"):
            engine.take(id)


def test_prompts_are_sections_that_differ():
    text = Prompts(tuple(range(5000)), "numbers", True)
    assert text(10, 0) == list(range(10)) and text(10, 1) != text(10, 2)
    assert len(text(9000, 3)) == 9000
    short = Prompts((1, 2, 3), "short", True)
    assert short(7, 5) == [1, 2, 3, 1, 2, 3, 1]
    made = random_prompts(50, "random_prompts")
    assert set(made(3000, 0)) <= set(range(50)) and made(20, 0) != made(20, 1) and random_prompts(5, "")(4, 0)


def test_corpus_is_the_beginning_of_moby_dick():
    text = read_corpus()
    assert text.startswith("Call me Ishmael.") and len(text) == MAX_CHARACTERS
