"""The engines that are compared, each started by `backend.py` as a process of its own: no two share a BLAS, a heap or a
warm-up. Only these modules may import the engines they stand for, and nothing imports them.
"""
