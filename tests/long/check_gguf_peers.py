"""Published GGUF files beside llama.cpp: python -m tests.long.check_gguf_peers [--only smollm2] [--tokens 24].

Greedy tokens must be llama.cpp's, or differ where our logits of both choices lie within the tie that its 8-bit
activations explain (mlxrt/bench/tokens.py). Perplexity on windows of Moby-Dick, second halves alone, must be within
0.3 %; the memory of a process after an answer is printed beside the file's size. Exit code 1 where one is not so.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path

import mlxrt
from mlxrt.bench.backend import Backend
from mlxrt.bench.corpus import read_corpus
from mlxrt.bench.tokens import TIE_8BIT, Agreement
from tests.long.check_real_models import PROMPTS, SOURCES

GGUFS = ["smollm2", "gemma3-270m", "tinyllama"]

WINDOW = 256
WITHIN = 0.003
MEMORY = """
import sys, mlxrt
with mlxrt.load(sys.argv[1]) as engine:
    engine.generate(engine.tokenizer.encode("The capital of France is"), max_tokens=24)
    print(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
"""


def compare_tokens(engine: mlxrt.Engine, peer: Backend, count: int) -> Agreement:
    agreement = Agreement()

    def gap(prompt: list[int], choices: list[int]) -> float:
        logits = engine.score(prompt)[-1]
        return abs(float(logits[choices[0]]) - float(logits[choices[1]]))

    for text in PROMPTS:
        prompt = list(engine.tokenizer.encode(text))
        ours = list(engine.generate(prompt, max_tokens=count, ignore_eos=True).tokens)
        theirs = peer.ask(do="generate", prompt=prompt, max_tokens=count)["tokens"]
        agreement.compare("llama.cpp", prompt, ours, theirs, TIE_8BIT, gap)
    return agreement


def compare_perplexity(engine: mlxrt.Engine, peer: Backend, windows: int) -> tuple[float, float]:
    tokens = list(engine.tokenizer.encode(read_corpus()[:200_000]))
    sections = [tokens[1000 * (i + 1) : 1000 * (i + 1) + WINDOW] for i in range(windows)]
    ours: list[float] = []
    for section in sections:
        ours += window_losses(engine, section, WINDOW // 2)
    theirs = peer.ask(do="losses", windows=sections, first=WINDOW // 2)["losses"]
    return tuple(math.exp(math.fsum(losses) / len(losses)) for losses in (ours, theirs))  # type: ignore[return-value]


def window_losses(engine: mlxrt.Engine, tokens: list[int], first: int) -> list[float]:
    import mlx.core as mx

    logits = engine.score(tokens)[first - 1 : -1]
    chosen = mx.take_along_axis(logits, mx.array(tokens[first:])[:, None], axis=-1)[:, 0]
    return (mx.logsumexp(logits, axis=-1) - chosen).tolist()


def check(name: str, path: Path, count: int, windows: int) -> bool:
    setting = {"gguf": str(path), "context": 1024, "threads": 1, "exact": True}
    with mlxrt.load(str(path)) as engine, Backend("llama.cpp", setting) as peer:
        agreement = compare_tokens(engine, peer, count)
        ours, theirs = compare_perplexity(engine, peer, windows)
    kilobytes = int(subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, check=True).stdout)
    allowed = 1.15 * path.stat().st_size / 1e6 + 150
    gaps = ", ".join(f"{d.index}: {d.gap:.3f}" for d in agreement.differences if d.gap is not None)
    equal, compared = agreement.equal["llama.cpp"], agreement.compared["llama.cpp"]
    print(
        f"{name}: {equal} of {compared} answers of {count} tokens equal, ties at ({gaps}), "
        f"{len(agreement.wrong)} wrong; perplexity {ours:.4f}, llama.cpp {theirs:.4f} ({ours / theirs - 1:+.3%}); "
        f"memory {kilobytes * 1024 / 1e6:.0f} MB, 1.15 x file + 150 MB = {allowed:.0f} MB",
        flush=True,
    )
    return not agreement.wrong and abs(ours / theirs - 1) <= WITHIN and kilobytes * 1024 / 1e6 <= allowed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=GGUFS)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    names = [options.only] if options.only else GGUFS
    passed = [check(name, SOURCES[name](), options.tokens, options.windows) for name in names]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
