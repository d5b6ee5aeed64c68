"""One file per op: its definition in plain MLX, its cases, its launch."""
