"""mlxrt before MLX: it brings the BLAS that MLX then finds."""

import mlxrt  # noqa: F401
