"""Linear layers over weights that MLX has no module for: lookup tables, Hadamard-rotated rows, codebooks."""
