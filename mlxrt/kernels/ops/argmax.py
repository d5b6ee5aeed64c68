"""The best token of each row and whether its logit is a number, in one launch: for the next step, and for the host."""

from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, KernelSource, op

SIZE = 1024
ARGMAX = KernelSource("argmax.metal", ("x",), ("tokens", "status"))


TIE = 9.0  # the largest of a row, twice in what one thread reads
CASES = [
    (1, 40, None), (3, 2500, None), (3, 1100, mx.nan), (2, 1024, mx.inf), (2, 33, -mx.inf),
    (2, 8200, None), (2, 9000, mx.nan), (2, 48, -mx.inf), (2, 2500, TIE), (2, 9000, TIE),
]  # fmt: skip
ODD_TOKENS = 17, 1000  # of the first row and of the second, which another simdgroup reads


def argmax_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, vocab, odd in CASES:
        mx.random.seed(vocab)
        x = mx.random.normal((rows, vocab)).astype(dtype)
        if odd == TIE:
            x[0, 17] = x[0, 17 + (8192 if vocab % 8 == 0 else 1024)] = odd
        elif odd == -mx.inf:
            x[0] = mx.full((vocab,), odd)
        elif odd is not None:
            for row, token in enumerate(ODD_TOKENS):
                x[row, token] = odd
        yield Case(f"[{rows}, {vocab}]{'' if odd is None else f' with {odd}'}", {"x": x})


@op(argmax_cases)
def argmax(x):
    """(tokens uint32 [R], status uint32 [R, 2]): the first of the largest logits; rows without a finite one have token 0.
    `status` is the same token, and 1 if the row has none."""
    tokens = mx.argmax(x, axis=-1)
    peak = mx.take_along_axis(x, tokens[:, None], axis=-1)[:, 0].astype(mx.float32)
    bad = ~mx.isfinite(peak)
    tokens = mx.where(bad, mx.array(0, mx.uint32), tokens.astype(mx.uint32))
    return tokens, mx.stack([tokens, bad.astype(mx.uint32)], axis=1)


@argmax.kernel(ARGMAX)
def launch(gpu, x):
    rows, vocab = x.shape
    outputs = [((rows,), mx.uint32), ((rows, 2), mx.uint32)]
    tokens, status = gpu(ARGMAX, [x], rows, SIZE, outputs, T=x.dtype, V=vocab)
    return tokens, status


def cpu_unsupported(x) -> str | None:
    return f"{x.ndim} dimensions of {x.dtype}" if x.dtype != mx.float32 or x.ndim != 2 else None


@argmax.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: iter(()))
def launch_cpu(cpu, x):
    return cpu.argmax(x)
