"""llama.cpp (PyPI xllamacpp) on the CPU: greedy tokens for prompts given as token ids.

Arguments: GGUF THREADS CONTEXT. Question: {prompt: [id], max_tokens}. Answer: [id], the end token included where
one was chosen.
"""

import sys
from typing import Any

from bench.sides.serving import serve


def start_server(gguf: str, threads: int, context: int, exact: bool = False) -> Any:
    """`exact`: keys and values in float32 and no flash attention, which rounds them."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_gpu_layers = 0
    params.n_ctx = context
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if exact:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def complete(server: Any, prompt: list[int], max_tokens: int) -> list[int]:
    # Log probabilities are asked for because they carry the ids of the tokens chosen.
    wish = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "cache_prompt": False, "logprobs": 1}
    reply = server.handle_completions(wish)
    if "error" in reply:
        raise SystemExit(f"llama.cpp refused the prompt: {reply['error']}")
    if (seen := reply["usage"]["prompt_tokens"]) != len(prompt):
        raise SystemExit(f"llama.cpp saw {seen} prompt tokens, {len(prompt)} were given")
    return [token["id"] for token in reply["choices"][0]["logprobs"]["content"]]


def main() -> None:
    gguf, threads, context = sys.argv[1:]
    server = start_server(gguf, int(threads), int(context))
    serve(lambda question: complete(server, question["prompt"], question["max_tokens"]))


if __name__ == "__main__":
    main()
