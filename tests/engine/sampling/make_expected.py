"""Writes expected.npz: what HF transformers' own logits processors make of the same logits.

Not a test. Run where torch is (it is no dependency of mlxrt): python tests/engine/sampling/make_expected.py
Made with torch 2.13.0 and transformers 5.22.2.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 131  # prime: no multiple of any block
HISTORY = [3, 5, 5, 9, 130, 0, 64]


def adjusters(p: dict) -> LogitsProcessorList:
    chain = LogitsProcessorList()
    if "repetition_penalty" in p:
        chain.append(RepetitionPenaltyLogitsProcessor(p["repetition_penalty"]))
    if "logit_bias" in p:
        chain.append(SequenceBiasLogitsProcessor([[[int(t)], v] for t, v in p["logit_bias"].items()]))
    if "suppress" in p:
        chain.append(SuppressTokensLogitsProcessor(p["suppress"]))
    return chain


def warpers(p: dict) -> LogitsProcessorList:
    chain = LogitsProcessorList([TemperatureLogitsWarper(p["temperature"])])
    if p.get("top_k"):
        chain.append(TopKLogitsWarper(p["top_k"]))
    if p.get("top_p", 1.0) < 1:
        chain.append(TopPLogitsWarper(p["top_p"]))
    if p.get("min_p"):
        chain.append(MinPLogitsWarper(p["min_p"]))
    return chain


def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    wide = rng.normal(size=VOCAB) * 4
    coarse = torch.tensor(rng.normal(size=VOCAB) * 2 + 16).bfloat16().float().numpy()  # many equal values
    peaked = rng.normal(size=VOCAB)
    peaked[77] += 20
    steps = np.repeat(np.arange(-10.0, 3.1), 10)[:VOCAB]
    found = {
        "wide": wide,
        "coarse": coarse,
        "peaked": peaked,
        "flat": np.zeros(VOCAB),
        "steps": np.resize(steps, VOCAB),
    }
    return {name: row.astype(np.float32) for name, row in found.items()}


def cases() -> list[dict]:
    filters = [
        {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
        for t, k, p, m in product([0.7, 1.0, 1.8], [0, 1, 7, 40], [1.0, 0.95, 0.5, 0.02], [0.0, 0.1])
    ]
    edits = [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.6, "logit_bias": {"4": 2.5, "77": -30.0}},
        {"suppress": [1, 2, 77]},
        {"repetition_penalty": 1.1, "logit_bias": {"5": 4.0, "6": -1.0}, "suppress": [6, 130]},
    ]
    mixed = [e | f for e, f in zip(edits * 3, filters[5::8])]
    return filters + [e | {"temperature": 1.0} for e in edits] + mixed


def main() -> None:
    history = torch.tensor([HISTORY])
    params, names, before, after = [], [], [], []
    for (name, row), p in product(rows().items(), cases()):
        adjusted = adjusters(p)(history, torch.tensor(row)[None].clone())
        params.append(p)
        names.append(name)
        before.append(adjusted[0].numpy())
        after.append(warpers(p)(history, adjusted)[0].numpy())
    given = rows()
    kept = np.packbits(np.isfinite(np.stack(after)), axis=1)
    edited = [i for i, p in enumerate(params) if set(p) & {"repetition_penalty", "logit_bias", "suppress"}]
    path = Path(__file__).with_name("expected.npz")
    np.savez_compressed(
        path,
        rows=np.stack(list(given.values())),
        row=np.array([list(given).index(n) for n in names]),
        params=np.array(json.dumps(params)),
        history=np.array(HISTORY),
        edited=np.array(edited),
        adjusted=np.stack([before[i] for i in edited]),
        kept=kept,
        scores=np.stack(after)[::7],  # a sample: the kept sets are all there
    )
    print(f"{path}: {len(params)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
