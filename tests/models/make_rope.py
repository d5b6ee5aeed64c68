"""Frequencies as HF transformers 5.22.2 computes them, for test_rope.py.

Run in a venv with torch and transformers: python tests/models/make_rope.py > tests/models/rope.json
"""

import json
import random

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

rng, cases = random.Random(3), []
for kind in ("linear", "llama3", "yarn", "yarn", "yarn", "llama3"):
    dim = rng.choice([16, 64, 128])
    context, original = rng.choice([(131072, 8192), (32768, 4096), (4096, 2048)])
    p = {"rope_type": kind, "rope_theta": rng.choice([1e4, 5e5, 1e6]), "factor": rng.choice([2.0, 4.0, 8.0, 32.0])}
    if kind == "llama3":
        p |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn" and rng.random() < 0.7:
        p |= rng.choice(
            [
                {"attention_factor": 1.3},
                {"mscale": 1.0, "mscale_all_dim": 0.7},
                {"truncate": False},
                {"beta_fast": 16.0},
            ]
        )
    if kind != "linear":
        p["original_max_position_embeddings"] = original
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=context,
        rope_parameters=dict(p),
    )
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    cases.append(
        {"dim": dim, "context": context, "rope_parameters": p, "inv_freq": inv_freq.tolist(), "magnitude": magnitude}
    )
print(json.dumps(cases, indent=1))
