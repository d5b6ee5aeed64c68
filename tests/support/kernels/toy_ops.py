"""Ops with a kernel of one line, which may be wrong."""

import mlx.core as mx

from mlxrt.kernels import Case, Op

from .inline_source import InlineSource

TWICE = InlineSource(
    "twice",
    ("x",),
    ("y",),
    text="uint i = thread_position_in_threadgroup.x; y[i] = static_cast<T>(float(x[i]) * 2.0f);",
)
THRICE = InlineSource("thrice", ("x",), ("y",), text=TWICE.body.replace("2.0f", "3.0f"))


def toy(name: str, factor: float, source: InlineSource) -> Op:
    """x times a factor, by a text that may say something else."""

    def cases(dtype):
        yield Case("one row", {"x": mx.random.normal((32,)).astype(dtype)})
        yield Case("zeros", {"x": mx.zeros((32,), dtype)})

    def launch(gpu, x):
        return gpu(source, [x], 1, 32, [(x.shape, x.dtype)], T=x.dtype)[0]

    made = Op(name, lambda x: x * factor, cases, {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2})
    made.kernel(source)(launch)
    return made
