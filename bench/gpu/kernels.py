"""The kernels of a decode step alone, at published shapes: what the device takes for each, without a model.

    python -m bench.gpu.kernels [SHAPE ...] [--prompt 512]

Each is launched by CUDA's driver (bench/gpu/device.py) over so many distinct matrices that none comes from a cache.
For trying another text, or another way to share its work, in seconds.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.clock import Clock
from bench.gpu.ops import copy_bandwidth, nbytes, weights
from mlxrt.kernels import (
    Pages,
    QKVLayout,
    QuantizedMatrix,
    backend,
    make_gpu,
    moe_down,
    moe_router_gate_up,
    paged_attention,
    qkv_attention,
    qmv,
)
from mlxrt.kernels.cuda.nvrtc import Launch
from mlxrt.kernels.dispatch import Gpu
from mlxrt.weights.source.cache_dir import cache_root

HALF = mx.bfloat16
DISTINCT = 3e8  # bytes of matrices that a chain goes over
STACKS = 3  # of experts


@dataclass(frozen=True)
class Layer:
    hidden: int
    heads: int
    keys: int
    inner: int  # of the MLP, or of an expert
    dim: int = 128
    experts: int = 0
    chosen: int = 8

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.keys) * self.dim


LAYERS = {
    "qwen3-0.6b": Layer(1024, 16, 8, 3072),
    "qwen3-8b": Layer(4096, 32, 8, 12288),
    "qwen3-30b-a3b": Layer(2048, 32, 4, 768, experts=128),
}
Call = Callable[[], object]


class Parts:
    """A layer's kernels, each as calls over distinct matrices."""

    def __init__(self, gpu: Gpu, layer: Layer, prompt: int):
        self.gpu, self.layer, self.prompt = gpu, layer, prompt
        self.made: dict[tuple[int, int], list[QuantizedMatrix]] = {}

    def matrices(self, rows: int, width: int) -> list[QuantizedMatrix]:
        if (rows, width) not in self.made:
            one = weights(self.gpu, rows, width, 4)
            count = min(48, max(4, int(DISTINCT / nbytes(one))))
            self.made[rows, width] = [one] + [weights(self.gpu, rows, width, 4) for _ in range(count - 1)]
        return self.made[rows, width]

    def product(self, rows: int, width: int, **more) -> list[Call]:
        x = mx.random.normal((1, width)).astype(HALF)
        return [lambda m=m: qmv.launch(self.gpu, x=x, matrix=m, **more) for m in self.matrices(rows, width)]

    def pages(self, n: int) -> list[Pages]:
        """Of n layers: the rows' blocks lie together, a tail is half full."""
        keys, dim, blocks = 2 * self.layer.keys, self.layer.dim, self.prompt // 32
        table, where = mx.arange(blocks)[None].astype(mx.int32), mx.array([[0, self.prompt, 16]])
        pools = [mx.random.normal((blocks, keys, 32, dim)).astype(HALF) for _ in range(n)]
        return [Pages(p, mx.random.normal((1, keys, 32, dim)).astype(HALF), table, where) for p in pools]

    def heads(self) -> QKVLayout:
        norm, speeds = mx.ones(self.layer.dim, HALF), 1e6 ** -(mx.arange(self.layer.dim // 2) / (self.layer.dim // 2))
        return QKVLayout(self.layer.heads, self.layer.keys, self.layer.dim, norm, norm, eps=1e-6, speeds=speeds)

    def attention(self) -> list[Call]:
        qkv, what = mx.random.normal((1, self.layer.qkv)).astype(HALF), {"heads": self.heads(), "scale": 0.09}
        return [lambda p=p: paged_attention.launch(self.gpu, qkv=qkv, pages=p, **what) for p in self.pages(48)]

    def entry(self) -> list[Call]:
        x, norm = mx.random.normal((1, self.layer.hidden)).astype(HALF), mx.ones(self.layer.hidden, HALF)
        what = {"heads": self.heads(), "scale": 0.09, "norm": norm, "eps": 1e-6}
        held = self.matrices(self.layer.qkv, self.layer.hidden)
        return [
            lambda m=m, p=p: qkv_attention.launch(self.gpu, x=x, matrix=m, pages=p, **what)
            for m, p in zip(held, self.pages(len(held)))
        ]

    def routed(self) -> tuple[list[Call], list[Call]]:
        """Router with gates and ups, and downs: every call chooses other experts."""
        it = self.layer
        norm, router = mx.ones(it.hidden, HALF), weights(self.gpu, it.experts, it.hidden, 8)
        ups = [stack(self.gpu, it.experts, 2 * it.inner, it.hidden) for _ in range(STACKS)]
        downs = [stack(self.gpu, it.experts, it.hidden, it.inner) for _ in range(STACKS)]
        xs = [mx.random.normal((1, it.hidden)).astype(HALF) for _ in range(24)]
        what = {"router": router, "k": it.chosen, "activation": "silu", "norm": norm, "eps": 1e-6, "normalise": True}
        first = [
            lambda x=x, i=i: moe_router_gate_up.launch(self.gpu, x=x, matrix=ups[i % STACKS], **what)
            for i, x in enumerate(xs)
        ]
        h = mx.random.normal((1, it.chosen, it.inner)).astype(HALF)
        shares = mx.full((1, it.chosen), 1 / it.chosen)
        chosen = [mx.random.permutation(it.experts)[: it.chosen][None].astype(mx.uint32) for _ in xs]
        second = [
            lambda x=x, e=e, i=i: moe_down.launch(
                self.gpu, x=h, experts=e, weights=shares, matrix=downs[i % STACKS], residual=x
            )
            for i, (x, e) in enumerate(zip(xs, chosen))
        ]
        return first, second

    def calls(self) -> dict[str, list[Call]]:
        it = self.layer
        norm = {"norm": mx.ones(it.hidden, HALF), "eps": 1e-6}
        found = {"QKV": self.product(it.qkv, it.hidden, **norm), "attention": self.attention(), "entry": self.entry()}
        x = mx.random.normal((1, it.hidden)).astype(HALF)
        found["output"] = self.product(it.hidden, it.heads * it.dim, residual=x)
        if it.experts:
            found["routed"], found["downs"] = self.routed()
            return found
        found["gates, ups"] = self.product(2 * it.inner, it.hidden, **norm, activation="silu", pair=True)
        found["down"] = self.product(it.hidden, it.inner, residual=x)
        return found


def stack(gpu: Gpu, count: int, rows: int, width: int) -> QuantizedMatrix:
    m = weights(gpu, count * rows, width, 4)
    shaped = [a.reshape(count, rows, -1) for a in (m.weight, m.scales, m.biases)]
    return QuantizedMatrix(*gpu.bundle(shaped), 4, 64, "affine")


def launched(gpu: Gpu, calls: list[Call]) -> list[Launch]:
    assert gpu.library is not None
    with gpu.library.recording() as launches:
        for call in calls:
            call()
    mx.eval([one.outputs for one in launches])
    return launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(LAYERS))
    parser.add_argument("--prompt", type=int, default=512)
    args = parser.parse_args()
    gpu = make_gpu(backend(), folder=cache_root() / "kernels")
    assert gpu is not None and gpu.library is not None, "no GPU, or no compiler, is here"
    copy = copy_bandwidth()
    print(f"copy {copy / 1e9:.0f} GB/s")
    for shape in args.shapes:
        clock = Clock(gpu.library)
        for name, calls in Parts(gpu, LAYERS[shape], args.prompt).calls().items():
            launches = launched(gpu, calls)
            often = math.ceil(40 / len(launches))  # a graph's own start is not a kernel's
            took = clock.seconds(launches * often) / len(launches) / often
            print(f"{shape} {name}: {1e6 * took:.2f} us, {launches[0].blocks} of {launches[0].threads[0]}", flush=True)


if __name__ == "__main__":
    main()
