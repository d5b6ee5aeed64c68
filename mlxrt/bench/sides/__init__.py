"""The engines that are compared, each started as a process of its own: no two share a BLAS, a heap or a warm-up.

Nobody imports these: `side.py` starts them. They alone may import the engines they stand for.
"""
