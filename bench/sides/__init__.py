"""The engines that are compared, each started as a process of its own: no two share a BLAS, a heap or a warm-up."""
