"""Time to the first token of a second turn over a long history, on a sliding-window model with real weights.

SmolLM2's weights as Mistral with a window of 512: the same matrices, another mask. Cold and warm alternate in one run.

    python -m bench.second_turn [--tokens 2048] [--rounds 5]
"""

import argparse
import json
import os
import shutil
import statistics
from pathlib import Path

import mlxrt
from mlxrt.bench.export import export
from mlxrt.bench.novel import read_text

WINDOW = 512


def as_mistral() -> Path:
    """The exported folder with another config; the weights are linked, not copied."""
    source = export("plain")
    folder = source.with_name(f"{source.name}-mistral{WINDOW}")
    folder.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "mistral", "sliding_window": WINDOW, "architectures": ["MistralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    link = folder / "model.safetensors"
    if not link.exists():
        os.link(source / "model.safetensors", link)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    engine = mlxrt.load(str(as_mistral()))
    tokens = engine.tokenizer.encode(read_text()[: args.tokens * 8])
    question = engine.tokenizer.encode("\n\nQuestion: who is speaking here, and why does he go to sea?\nAnswer:")
    ratios, colds, warms = [], [], []
    for i in range(args.rounds):
        history = tokens[i * 64 : i * 64 + args.tokens]
        engine.store.clear()
        first = engine.generate(history, max_tokens=16, ignore_eos=True)
        turn = [*history, *first.tokens, *question]
        again = engine.generate(turn, max_tokens=8, ignore_eos=True)
        engine.store.clear()
        fresh = engine.generate(turn, max_tokens=8, ignore_eos=True)
        assert again.tokens == fresh.tokens and fresh.cached_tokens == 0, "a reused prefix changed the answer"
        colds.append(fresh.timings.first_token_s)
        warms.append(again.timings.first_token_s)
        ratios.append(warms[-1] / colds[-1])
        print(
            f"round {i}: cold {colds[-1]:.3f} s, second turn {warms[-1]:.3f} s "
            f"({again.cached_tokens} of {len(turn)} tokens reused)",
            flush=True,
        )
    warm, cold = statistics.median(warms), statistics.median(colds)
    print(
        f"first token of the second turn: {100 * statistics.median(ratios):.1f} % of cold "
        f"(median of {args.rounds}; {warm:.3f} against {cold:.3f} s; load {os.getloadavg()[0]:.1f})"
    )


if __name__ == "__main__":
    main()
