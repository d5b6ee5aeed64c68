"""Published GGUF files beside llama.cpp: python -m tests.long.check_gguf_peers [--only smollm2] [--tokens 24].

With --converted files that `mlxrt convert` writes of them, straight and by way of a folder: the same checks, and the
errors of our encoders on real weights beside those of llama.cpp's own quantiser, which its package exports.

Greedy tokens must be llama.cpp's, or differ where our logits of both choices lie within the tie that its 8-bit
activations explain (mlxrt/bench/tokens.py). Perplexity on windows of Moby-Dick, second halves alone, must be within
0.3 %; the memory of a process after an answer is printed beside the file's size. Exit code 1 where one is not so.
"""

import argparse
import ctypes
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

import mlxrt
from mlxrt.bench.backend import Backend
from mlxrt.bench.corpus import read_corpus
from mlxrt.bench.tokens import TIE_8BIT, Agreement
from mlxrt.cli import main as run_cli
from mlxrt.weights.convert.gguf_blocks import encode_blocks
from mlxrt.weights.convert.k_quants import ENCODERS
from mlxrt.weights.formats.gguf.reader import GGML_BLOCKS
from tests.long.check_real_models import PROMPTS, SOURCES
from tests.weights.test_k_quant_encoders import plain

GGUFS = ["smollm2", "gemma3-270m", "tinyllama"]

WINDOW = 256
WITHIN = 0.003
# Of packed files: between f16 and q8_0 of the same weights llama.cpp's own perplexity moves by 0.8 %, ours by 0.1 %.
WITHIN_8BIT = 0.01
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
        # llama.cpp goes on without its end token, we with it: what follows is another text
        end = next((i for i, token in enumerate(ours) if token in engine.tokenizer.eos_ids), count)
        agreement.compare("llama.cpp", prompt, ours[:end], theirs[:end], TIE_8BIT, gap)
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


def check(name: str, path: Path, count: int, windows: int, within: float = WITHIN, packed: bool = True) -> bool:
    """`within`: of llama.cpp's perplexity; `packed`: memory is compared with the file's, floats take more."""
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
    fits = not packed or kilobytes * 1024 / 1e6 <= allowed
    return not agreement.wrong and abs(ours / theirs - 1) <= within and fits


def write_converted(names: list[str], folder: Path) -> Iterator[tuple[str, Path]]:
    """Files of several types, removed as soon as they were looked at."""
    for name in names:
        source = SOURCES[name]()
        middle = folder / f"{name}-folder"  # the tokenizer goes through tokenizer.json, the weights through our module
        assert run_cli(["convert", str(source), str(middle), "--format", "mlx", "--bits", "16", "--no-check"]) == 0
        for given, kind in ((source, "q8_0"), (source, "q4_k_m"), (middle, "f16"), (middle, "q5_k_m")):
            path = folder / f"{name}-{kind}.gguf"
            assert run_cli(["convert", str(given), str(path), "--type", kind, "--no-check"]) == 0
            yield f"{name} {kind} from {'GGUF' if given is source else 'a folder'}", path
            path.unlink()


def load_quantizer() -> ctypes.CDLL:
    from xllamacpp import xllamacpp

    library = ctypes.CDLL(xllamacpp.__file__)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    return library


def compare_encoders(source: Path) -> bool:
    """Squared errors of the weights of one layer's matrices: ours, llama.cpp's, and plain minima and maxima."""
    library = load_quantizer()
    tensors = [t for t in gguf.GGUFReader(source).tensors if t.name.startswith("blk.3.") and len(t.shape) == 2]
    values = [gguf.quants.dequantize(t.data, t.tensor_type).reshape(-1) for t in tensors]
    x = np.concatenate([v[: len(v) // 256 * 256] for v in values]).reshape(-1, 256).astype(np.float32)
    passed = True
    for kind in ENCODERS:
        type_ = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[type_]
        theirs = np.empty((len(x), 256 // block * size), np.uint8)
        library.ggml_quantize_chunk(int(type_), x.ctypes.data, theirs.ctypes.data, 0, len(x), 256, None)
        ours = encode_blocks(x.reshape(-1, GGML_BLOCKS[kind]), kind).reshape(len(x), -1)
        decoded = [gguf.quants.dequantize(blocks, type_) for blocks in (ours, theirs)]
        error, known, simple = (float(((y - x) ** 2).mean() / (x**2).mean()) for y in (*decoded, plain(x, kind)))
        print(
            f"{kind}: squared error {error:.3e}, over llama.cpp's {error / known:.3f}, over plain {error / simple:.3f}"
        )
        passed &= error < 1.06 * known and error < simple
    return passed


def check_converted(names: list[str], count: int, windows: int) -> bool:
    passed = compare_encoders(SOURCES["gemma3-270m"]())  # of several types: one of four bits alone favours these
    with tempfile.TemporaryDirectory(prefix="mlxrt-converted-") as folder:
        for label, path in write_converted(names, Path(folder)):
            packed = "f16" not in path.name
            passed &= check(label, path, count, windows, WITHIN_8BIT if packed else WITHIN, packed)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=GGUFS)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--converted", action="store_true", help="files that mlxrt convert writes")
    options = parser.parse_args()
    names = [options.only] if options.only else GGUFS
    if options.converted:
        return int(not check_converted(names, options.tokens, options.windows))
    passed = [check(name, SOURCES[name](), options.tokens, options.windows) for name in names]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
