"""Run several requests in one batch, with priorities and own sampling: python examples/batch.py [MODEL]"""

import sys

import mlxrt
from mlxrt import EngineConfig, Request, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

requests = [
    Request(prompt="The capital of France is", params=SamplingParams(max_tokens=8)),
    Request(prompt="The capital of Italy is", params=SamplingParams(max_tokens=8), priority=1),
    Request(prompt="A poem:", params=SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, seed=7), deadline_s=60),
]
with mlxrt.load(MODEL, EngineConfig(max_running=8)) as engine:
    for request, done in zip(requests, engine.generate(requests)):  # a list in, a list out, in order
        print(f"{request.prompt!r} -> {done.text!r} ({done.finish_reason})")
    stats = engine.stats()
    print(f"{stats.positions} tokens computed, {stats.reused_tokens} reused")
