"""JANGTQ on a GPU: kernels against their meaning, then a stack of MiniMax-M2-shaped experts, decoding and prefilling.

usage: python -m bench.gpu.jang [--layers N] [--experts E] [--dtype float16|bfloat16] [--bits 2] [--repeat N]
                                [--turn FILE] [--unproved]
Prints a JSON object per line. decode: all layers for one token, by our kernels and in affine 2 bit by MLX's gather_qmm.
prefill: 512 tokens, by reading an expert once for all its tokens and by a matvec per row. Exit 1 when one is wrong.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

# isort: off
import mlxrt  # noqa: F401  before MLX
import mlx.core as mx
# isort: on

from bench.gpu.clock import Clock
from bench.gpu.device import table
from bench.gpu.ops import copy_bandwidth
from bench.gpu.turn import turn
from mlxrt.kernels import OPS, PLAIN, Kernels, backend, make_gpu, moe_down, moe_gate_up
from mlxrt.kernels.error_report import DTYPES, cases_of, prove, truth
from mlxrt.models.base import Fusible
from mlxrt.models.moe import ExpertLinear, Experts, PackedExpertLinear, entering, stack_of
from mlxrt.models.quantized.lut_linear import CodedExpertLinear, Coding
from mlxrt.weights.source.cache_dir import cache_root

HIDDEN, INNER, USED, TOKENS = 3072, 1536, 8, 512
MINE = ("turn", "moe_gate_up", "moe_down", "moe_grouped", "lut_dequantize", "codebook_rows")
SHAPES = (("gate_proj", HIDDEN, INNER), ("up_proj", HIDDEN, INNER), ("down_proj", INNER, HIDDEN))


def say(**told) -> None:
    print(json.dumps(told), flush=True)


def proven(kernels: Kernels) -> bool:
    """Every kernel of this family on all its cases."""
    fine = True
    for name in MINE:
        for dtype in DTYPES:
            for case in cases_of(OPS[name], dtype, large=True):
                if OPS[name].unsupported(**case.arguments()):
                    continue
                proof = prove(OPS[name], case, kernels.gpu, truth(OPS[name], case))
                holds = proof.holds(OPS[name].tolerance[dtype])
                fine &= holds
                if not holds:
                    say(op=name, dtype=dtype, case=case.name, error=proof.error, told=proof.told)
    say(proved=list(MINE), right=fine)
    return fine


def random_words(shape: tuple[int, ...]) -> mx.array:
    return mx.random.randint(-(1 << 31), (1 << 31) - 1, shape).view(mx.uint32)


def coded_layer(count: int, bits: int) -> Experts:
    layer = Experts(count, 32, 32)
    for name, width, outs in SHAPES:
        linear = CodedExpertLinear(Coding.jangtq(bits, width, 42), count, outs)
        linear.words = random_words(linear.words.shape)
        linear.norms = mx.random.uniform(0.5, 1.5, linear.norms.shape).astype(mx.float16)
        mx.eval(linear.words, linear.norms)
        layer[name] = linear
    return layer


def affine_layer(count: int, dtype: mx.Dtype) -> Experts:
    layer = Experts(count, 32, 32)
    for name, width, outs in SHAPES:
        linear = PackedExpertLinear(ExpertLinear(1, 64, 1), 64, 2, "affine")
        linear.weight = random_words((count, outs, width // 16))
        linear.scales = (mx.random.uniform(0.5, 1.5, (count, outs, width // 64)) * width**-0.5).astype(dtype)
        linear.biases = -1.5 * linear.scales
        mx.eval(linear.parameters())
        layer[name] = linear
    return layer


def handed(layers: list[Experts], kernels: Kernels) -> list[Experts]:
    for layer in layers:
        for part in layer.modules():
            part.kernels = kernels
    return layers


def laid(layers: list[Experts]) -> list[Experts]:
    """Joined and laid together, as a model's layers are."""
    for layer in layers:
        for part in reversed(layer.modules()):
            if isinstance(part, Fusible):
                part.fuse()
                mx.eval(part.parameters())
        for part in layer.modules():
            if not part.children():
                layer.together(part)
    return layers


def milliseconds(run: Callable[[mx.array], mx.array], x: mx.array, repeat: int) -> float:
    """Of one step, compiled as a decode step is."""
    run = mx.compile(run)
    for _ in range(3):
        mx.eval(run(x))
    mx.synchronize()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeat):
            mx.eval(run(x))
        mx.synchronize()
        best = min(best, (time.perf_counter() - start) / repeat)
    return 1e3 * best


def through(layers: list[Experts], x: mx.array, routes: list[tuple[mx.array, mx.array]]) -> mx.array:
    for layer, (experts, weights) in zip(layers, routes, strict=True):
        x = layer(x, experts, weights, residual=x)
    return x


def routes_for(layers: int, tokens: int, count: int) -> list[tuple[mx.array, mx.array]]:
    made = []
    for _ in range(layers):
        experts = mx.argsort(mx.random.uniform(shape=(tokens, count)), axis=-1)[:, :USED].astype(mx.uint32)
        made.append((experts, mx.softmax(mx.random.normal((tokens, USED)), axis=-1)))
    mx.eval(made)
    return made


def by_rows(layer: Experts, x: mx.array, experts: mx.array, weights: mx.array, gpu) -> mx.array:
    """Every row by the decode kernels, however many there are: what prefill would cost without a path of its own."""
    first, last = layer.gate_up_proj, layer.down_proj
    h = moe_gate_up.launch(gpu, entering(first, x), experts, stack_of(first), "silu")
    return moe_down.launch(gpu, entering(last, h), experts, weights, stack_of(last))


def truth_of(layer: Experts, x: mx.array, experts: mx.array, weights: mx.array, kernels: Kernels) -> mx.array:
    """What a few rows should give, in float32 and by plain MLX on the CPU."""
    handed([layer], PLAIN)
    with mx.stream(mx.cpu):
        y = layer(x.astype(mx.float32), experts, weights)
        mx.eval(y)
    handed([layer], kernels)
    return y


def agree(ours: mx.array, other: mx.array) -> float:
    return (mx.abs(ours - other).max() / mx.abs(other).max()).astype(mx.float32).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"))
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--turn", help="measure while holding a lock on this file")
    parser.add_argument("--device", action="store_true", help="also a table of what the device itself takes")
    parser.add_argument("--unproved", action="store_true", help="without every case of every kernel first")
    options = parser.parse_args()
    if backend() == "reference":
        print("bench.gpu.jang needs a GPU", file=sys.stderr)
        return 2
    kernels = Kernels("strict", make_gpu(backend(), folder=cache_root() / "kernels"))
    fine = options.unproved or proven(kernels)
    mx.random.seed(0)
    coded = laid(handed([coded_layer(options.experts, options.bits) for _ in range(options.layers)], kernels))
    dtype = DTYPES[options.dtype]
    if options.turn:  # compile now what will be timed
        once = argparse.Namespace(**vars(options) | {"repeat": 1})
        decode(coded[:1], dtype, once)
        prefill(coded[0], kernels, dtype, once)
    with turn(options.turn):
        fine &= decode(coded, dtype, options)
        if options.device:
            kernel_table(coded, dtype, kernels)
        mx.clear_cache()
        return 0 if prefill(coded[0], kernels, dtype, options) and fine else 1


def decode(coded: list[Experts], dtype: mx.Dtype, options: argparse.Namespace) -> bool:
    routes, x = routes_for(len(coded), 1, options.experts), mx.random.normal((1, HIDDEN)).astype(dtype)
    right = truth_of(coded[0], x, *routes[0], coded[0].kernels)
    off = agree(coded[0](x, *routes[0]).astype(mx.float32), right)
    ours = milliseconds(lambda x: through(coded, x, routes), x, options.repeat)
    affine = handed([affine_layer(options.experts, dtype) for _ in coded], PLAIN)
    theirs = milliseconds(lambda x: through(affine, x, routes), x, options.repeat)
    told = {"layers": len(coded), "bits": options.bits, "error": off}
    say(decode_ms=ours, affine2_gather_qmm_ms=theirs, ratio=theirs / ours, **told)
    return off < 0.05


def kernel_table(coded: list[Experts], dtype: mx.Dtype, kernels: Kernels) -> None:
    library = kernels.gpu.library if kernels.gpu is not None else None
    assert library is not None, "NVIDIA's compiler is not here"
    x = mx.random.normal((1, HIDDEN)).astype(dtype)
    with library.recording() as launches:
        mx.eval(through(coded, x, routes_for(len(coded), 1, coded[0].down_proj.words.shape[0])))
    table(Clock(library), launches, copy_bandwidth())


def prefill(layer: Experts, kernels: Kernels, dtype: mx.Dtype, options: argparse.Namespace) -> bool:
    [(experts, weights)] = routes_for(1, TOKENS, options.experts)
    rows = mx.random.normal((TOKENS, HIDDEN)).astype(dtype)
    few, right = slice(0, 3), truth_of(layer, rows[:3], experts[:3], weights[:3], kernels)
    off = [
        agree(way[few].astype(mx.float32), right)
        for way in (layer(rows, experts, weights), by_rows(layer, rows, experts, weights, kernels.gpu))
    ]
    repeat = max(3, options.repeat // 6)
    tiles = milliseconds(lambda rows: layer(rows, experts, weights), rows, repeat)
    single = milliseconds(lambda rows: by_rows(layer, rows, experts, weights, kernels.gpu), rows, repeat)
    say(prefill_tokens=TOKENS, prefill_ms=tiles, per_row_ms=single, ratio=single / tiles, errors=off)
    return max(off) < 0.05


if __name__ == "__main__":
    sys.exit(main())
