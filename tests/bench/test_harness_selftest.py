"""A/A test of the harness: the same engine twice must come out equal, and one that is 10 % slower must come out slower.

Through the decode suite on a small random model, one process an engine, on this machine as it is. HARNESS_REPEATS sets
the number of repetitions (default 20, about an hour on a busy machine): 95 % must be equal, 90 % caught.
"""

import json
import math
import os

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxrt.bench import machine
from mlxrt.bench.backend import Backend
from mlxrt.bench.bench_model import BenchModel
from mlxrt.bench.comparison import PROCESSOR, WALL, Comparison, Options
from mlxrt.bench.corpus import random_prompts
from mlxrt.bench.result import OURS
from mlxrt.bench.statistics import StoppingRule
from mlxrt.bench.suites import cases
from mlxrt.engine.weight_size import build_skeleton
from mlxrt.weights.random_models import random_weights

REPEATS = int(os.environ.get("HARNESS_REPEATS", 20))
RULE = StoppingRule(0.06, 0.99, min_rounds=32, max_rounds=1500, seconds=300, min_late_rounds=32)
MAX_WIDTH = 0.08
TOKENS, RESTARTS = 8, 3  # decoded in a round; of both engines within a comparison
OTHER = "again"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "vocab_size": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.fixture
def model_folder(tmp_path):
    model = build_skeleton(CONFIG)
    random_weights(model, None, mx.float32)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def compare(folder, slower, clock, rule, restarts):
    """The ratio of mlxrt to the other engine."""
    setting = {"model": str(folder), "config": {"ahead": 0, "kv_memory": "64M"}}
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    program = "tests.bench.faulty_backends" if slower else "mlxrt.bench.backends.mlxrt"
    backends = {OURS: Backend(OURS, setting, env=env)}
    try:
        fault = {"fault": "slower", "slower": slower} if slower else {}
        backends[OTHER] = Backend(OTHER, setting | fault, program=program, env=env)
        options = Options((32,), TOKENS, rule)
        prompts = random_prompts(CONFIG["vocab_size"], "")
        found = BenchModel.find(str(folder))
        comparison = Comparison(found, backends, options, {"copy_bytes_per_s": 1e9}, prompts)
        comparison.time_limit, comparison.clock, comparison.restarts = rule.seconds, clock, restarts
        [case] = cases("decode", options)
        figure = next(iter(case.run(comparison)))
    finally:
        for backend in backends.values():
            backend.kill()
    assert figure.agreement["equal"] == figure.agreement["compared"], "the tokens of the same model differ"
    return figure.ratios[OTHER]


@pytest.mark.slow
def test_equal_engines_are_equal_and_slower_ones_slower(model_folder):
    clock = PROCESSOR if machine.measure_load().busy else WALL
    equal = caught = 0
    for i in range(REPEATS):
        same = compare(model_folder, 0.0, clock, RULE, RESTARTS)
        slow = compare(model_folder, 0.1, clock, RULE, RESTARTS)
        equal += same.low <= 1 <= same.high and same.width <= MAX_WIDTH
        caught += slow.low > 1
        print(f"{i + 1:3}  same {same} width {same.width:.1%}, {same.rounds} rounds; slower {slow}", flush=True)
    assert equal >= math.ceil(0.95 * REPEATS), f"{equal} of {REPEATS} comparisons with itself were equal"
    assert caught >= math.ceil(0.9 * REPEATS), f"{caught} of {REPEATS} slower engines were caught"


def test_an_engine_that_takes_twice_as_long_is_slower(model_folder):
    rule = StoppingRule(0.5, 0.95, min_rounds=8, max_rounds=8)
    assert compare(model_folder, 1.0, PROCESSOR, rule, 0).conclusion == "faster"
