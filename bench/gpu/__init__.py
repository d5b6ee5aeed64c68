"""Benchmarks and micro-benchmarks on a GPU. `python -m bench.gpu` runs the GPU tests, then decode of four shapes."""
