"""The dtypes that models compute in: by name, and as kernels and checkpoints tell them from packed numbers."""

import mlx.core as mx

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
FLOATS = tuple(DTYPES.values())
HALVES = (mx.float16, mx.bfloat16)
