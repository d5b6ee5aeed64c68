"""config.json: nothing ignored in silence."""

import pytest

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.models import find

from ..support.log_lines import capture_log

RAW = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def parse(**changes):
    raw = {k: v for k, v in {**RAW, **changes}.items() if v != "absent"}
    return find(raw).parse(raw)


def test_plain():
    said = capture_log()
    config = parse()
    assert (config.head_dim, config.windows, said) == (16, (None,) * 3, [])


def test_an_unknown_key_is_printed():
    said = capture_log()
    parse(flux_capacitor=1)
    assert len(said) == 1 and "flux_capacitor" in said[0]


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings"])
def test_a_missing_key_is_named(key):
    with pytest.raises(BadCheckpoint, match=key):
        parse(**{key: "absent"})


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(hidden_act="gelu"), "hidden_act.*gelu"),
        (dict(hidden_act=["silu"]), "hidden_act"),
        (dict(rope_interleaved=True), "rope_interleaved"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(sliding_window=8), "sliding_window"),
        (dict(layer_types=["linear_attention"] * 3), "linear_attention"),
        (dict(model_type="mamba9"), "mamba9.*supported: .*llama"),
    ],
)
def test_a_known_key_with_an_unsupported_value(changes, words):
    with pytest.raises(UnsupportedModel, match=words):
        parse(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(hidden_size="64"),
        dict(hidden_size=-1),
        dict(hidden_size=True),
        dict(hidden_size=1 << 40),
        dict(hidden_size=63),
        dict(num_key_value_heads=3),
        dict(rms_norm_eps=10**400),
        dict(rms_norm_eps=float("nan")),
        dict(tie_word_embeddings=1),
        dict(layer_types=["full_attention"]),
        dict(layer_types="full_attention"),
        dict(layer_types=["sliding_attention"] * 3),
        dict(model_type=3),
        dict(model_type="absent"),
    ],
)
def test_damaged_values_are_refused(changes):
    with pytest.raises(BadCheckpoint):
        parse(**changes)


def test_windows():
    assert parse(model_type="mistral", sliding_window=8).windows == (8, 8, 8)
    assert parse(model_type="mistral", sliding_window=None).windows == (None,) * 3
    assert (
        parse(model_type="qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=2).windows
        == (None,) * 3
    )
    assert parse(model_type="qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1).windows == (
        None,
        8,
        8,
    )
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse(model_type="qwen2", sliding_window=8, layer_types=kinds).windows == (8, None, 8)


def test_null_means_not_given():
    config = parse(num_key_value_heads=None, head_dim=None)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
