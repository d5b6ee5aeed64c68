"""Log probabilities of rows of logits: of the chosen tokens, and of the n best ones in order. No softmax, no sort."""

from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, KernelSource, op
from .draw import MAX_SLICES, SLICE, cpu_unsupported, sort_key

MAX_COUNT = 256
SLICES = KernelSource("logprob_slices.metal", ("x",), ("parts", "sums"))
TOP = KernelSource("top_logprobs.metal", ("x", "parts", "sums", "status"), ("result", "logprobs"))


def top_logprobs_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, vocab, n, kind in [
        (2, 5000, 5, ""), (3, 2100, 1, "steps"), (1, 40, 40, ""), (2, 4096, 3, "even"), (2, 700, 20, "few"), (1, 2056, 9, ""),
    ]:  # fmt: skip
        mx.random.seed(vocab)
        x = mx.random.normal((rows, vocab)) * 3
        if kind == "few":
            x = mx.where(mx.arange(vocab) % 97 == 3, x, -mx.inf)
        if kind:
            x[rows - 1] = mx.round(x[rows - 1]) if kind == "steps" else mx.zeros((vocab,))
        status = mx.stack([mx.arange(3, 3 + rows), mx.arange(rows) % 2], axis=1).astype(mx.uint32)
        yield Case(f"{n} of {vocab} {kind}".strip(), {"x": x.astype(dtype), "status": status}, {"n": n})


@op(top_logprobs_cases)
def top_logprobs(x, status, n):
    """(result uint32 [R, 2 + n], logprobs float32 [R, 1 + n]) of logits x [R, V].

    `result` begins with `status` [R, 2], whose first number is the chosen token; then come the n best tokens, of equal
    ones that with the lower id first. `logprobs` has the chosen token's first, then theirs.
    """
    total = mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True)
    v = x.shape[1]
    # Every key once: that of the token, and where equal ones come.
    order = (sort_key(x.astype(mx.float32)).astype(mx.uint64) << 32) | (v - 1 - mx.arange(v)).astype(mx.uint64)
    best = mx.sort(mx.topk(order, n, axis=-1) if n < v else order, axis=-1)[:, ::-1]
    ids = mx.array(v - 1, mx.uint32) - (best & mx.array(2**32 - 1, mx.uint64)).astype(mx.uint32)
    named = mx.concatenate([status[:, :1], ids], axis=1)
    logprobs = mx.take_along_axis(x, named, axis=1).astype(mx.float32) - total
    return mx.concatenate([status, ids], axis=1), logprobs


def unsupported(x, status, n) -> str | None:
    if n > MAX_COUNT:
        return f"{n} log probabilities, more than {MAX_COUNT}"
    if x.shape[1] > MAX_SLICES * SLICE:
        return f"a vocabulary of {x.shape[1]} tokens, more than {MAX_SLICES * SLICE}"
    return None


@top_logprobs.kernel(SLICES, TOP, unsupported=unsupported)
def launch(gpu, x, status, n):
    rows, v = x.shape
    s = -(-v // SLICE)
    shapes = [((rows, s * 8), mx.uint32), ((rows, s, 2), mx.float32)]
    parts, sums = gpu(SLICES, [x], (s, rows, 1), 256, shapes, T=x.dtype, V=v, S=s)
    shapes = [((rows, n + 2), mx.uint32), ((rows, n + 1), mx.float32)]
    return tuple(gpu(TOP, [x, parts, sums, status], rows, 1024, shapes, T=x.dtype, V=v, S=s, K=n))


@top_logprobs.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: iter(()))
def launch_cpu(cpu, x, status, n):
    return cpu.top_logprobs(x, status, n)
