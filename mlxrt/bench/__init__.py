"""The benchmark: engines side by side, every figure with its interval, its roof and its tokens. Asked by `mlxrt bench`.

Nothing here decides what is good: it measures, compares and says how sure it is.
"""

SUITES = {
    "decode": "tokens per second after prompts of several lengths",
    "prefill": "prompt tokens per second",
    "prefix": "first token when most of the prompt is known: second turn, edited tail, restart",
    "batch": "many requests of mixed lengths, arriving one after the other",
    "kv": "kinds of keys and values: memory, speed, error of the logits",
    "kernels": "every kernel beside MLX's own op: time, bytes moved, share of copy bandwidth",
    "startup": "import, load, shell to first token",
    "quality": "perplexity and agreement of kinds of keys and values on real text",
}
