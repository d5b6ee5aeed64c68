"""What CPUs run in place of MLX's own products with packed weights: C sources, how they are compiled, how they are called."""
