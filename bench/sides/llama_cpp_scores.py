"""llama.cpp (PyPI xllamacpp) on the CPU: the log probabilities of every next token after prompts given as token ids.

Arguments: GGUF THREADS CONTEXT. Question: {prompt: [id], vocab}. Answer: [log probability], by token id.
"""

import sys
from typing import Any

from bench.sides.llama_cpp import start_server
from bench.sides.serving import serve


def score(server: Any, prompt: list[int], vocab: int) -> list[float]:
    wish = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_prompt": False, "logprobs": vocab}
    reply = server.handle_completions(wish)
    if "error" in reply:
        raise SystemExit(f"llama.cpp refused the prompt: {reply['error']}")
    found = {t["id"]: t["logprob"] for t in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    if len(found) != vocab:
        raise SystemExit(f"llama.cpp gave {len(found)} of {vocab} log probabilities")
    return [found[i] for i in range(vocab)]


def main() -> None:
    gguf, threads, context = sys.argv[1:]
    server = start_server(gguf, int(threads), int(context), exact=True)
    serve(lambda question: score(server, question["prompt"], question["vocab"]))


if __name__ == "__main__":
    main()
