"""The benchmark harness behind `mlxrt bench`: engines interleaved on one machine, every figure with its confidence
interval, its roofline and a check of the tokens.
"""

SUITES = {
    "decode": "tokens per second after prompts of several lengths",
    "prefill": "prompt tokens per second",
    "prefix": "first token when most of the prompt is cached: second turn, edited tail, restart",
    "batch": "many requests of mixed lengths, all at once and arriving one after the other",
    "serving": "long prompts arriving beside a running stream: stalls, waits, memory, padding",
    "kv": "KV cache kinds: memory, speed, error of the logits",
    "kernels": "every kernel beside MLX's own op: time, bytes moved, share of copy bandwidth",
    "startup": "import, load, shell to first token",
    "quality": "perplexity and agreement on real text, by KV cache kind and weight bits",
}
