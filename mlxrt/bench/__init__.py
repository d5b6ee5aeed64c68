"""The benchmark: engines side by side, every figure with its interval, its roof and its tokens. Asked by `mlxrt bench`.

Nothing here decides what is good: it measures, compares and says how sure it is.
"""
