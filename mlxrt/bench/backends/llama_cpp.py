"""llama.cpp (PyPI xllamacpp): greedy tokens for prompts given as token ids, through its own server in this process.

Setting: {gguf, context, parallel, threads, gpu, exact: KV cache in float32 and no flash attention, which rounds it}.
Questions as in `mlxrt.py`: generate {prompt, max_tokens, fresh, ends}, batch {requests}; and scores {prompt, vocab} ->
the log probability of every next token by its id; losses {windows, first}.
"""

import time
from typing import Any

from mlxrt.bench.backends.serve import Clock, Served, run_clients, serve
from mlxrt.errors import MlxrtError


class LlamaCppBackend(Served):
    def __init__(self, setting: dict[str, Any]):
        import xllamacpp

        began = time.perf_counter()
        self.threads, parallel = setting["threads"], setting.get("parallel", 1)
        params = xllamacpp.CommonParams()
        params.model.path = setting["gguf"]
        params.n_gpu_layers = 999 if setting.get("gpu") else 0
        params.n_parallel = parallel
        params.n_ctx = setting["context"] * parallel
        params.warmup = False
        params.verbosity = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        if setting.get("exact"):
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)
        self.load_s = time.perf_counter() - began

    def info(self) -> dict[str, Any]:
        import xllamacpp

        name = f"llama.cpp (xllamacpp {xllamacpp.__version__})"
        return {"engine": name, "said": [], "load_s": self.load_s, "threads": self.threads}

    def generate(self, prompt: list[int], max_tokens: int, fresh: bool = True, ends: bool = False) -> dict[str, Any]:
        clock = Clock()
        tokens, usage = self.complete(prompt, max_tokens, not fresh, clock, ends)
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {"tokens": tokens, "cached": cached} | clock.to_dict()

    def complete(
        self, prompt: list[int], max_tokens: int, reuse: bool, clock: Clock, ends: bool = False
    ) -> tuple[list[int], dict[str, Any]]:
        """`ends`: whether an end token ends the answer (and is its last token)."""
        # Log probabilities are asked for because they carry the ids of the tokens chosen.
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "cache_prompt": reuse, "logprobs": 1}
        tokens: list[int] = []
        last: dict[str, Any] = {}

        def on_chunk(chunk: dict[str, Any]) -> None:
            last.update(chunk)
            for choice in chunk.get("choices", ()):
                for token in (choice.get("logprobs") or {}).get("content") or ():
                    tokens.append(token["id"])
                    clock.mark()

        self.server.handle_completions(body | {"stream": True, "ignore_eos": not ends}, on_chunk)
        if "error" in last:
            raise MlxrtError(f"refused the prompt: {last['error']}")
        usage = last.get("usage", {})
        if usage.get("prompt_tokens") != len(prompt):
            raise MlxrtError(f"saw {usage.get('prompt_tokens')} prompt tokens of {len(prompt)}")
        return tokens, usage

    def scores(self, prompt: list[int], vocab: int) -> list[float]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_prompt": False, "logprobs": vocab}
        reply = self.server.handle_completions(body)
        if "error" in reply:
            raise MlxrtError(f"refused the prompt: {reply['error']}")
        found = {t["id"]: t["logprob"] for t in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
        if len(found) != vocab:
            raise MlxrtError(f"gave {len(found)} of {vocab} log probabilities")
        return [found[i] for i in range(vocab)]

    def losses(self, windows: list[list[int]], first: int) -> dict[str, Any]:
        """Negative log probability of every token from `first` on.

        A bias makes each of them the one that is sampled; the probability it is reported with is without the bias.
        """
        losses = []
        for tokens in windows:
            for i in range(first, len(tokens)):
                body = {"prompt": tokens[:i], "max_tokens": 1, "temperature": 0, "cache_prompt": True, "logprobs": 1}
                reply = self.server.handle_completions(body | {"logit_bias": [[tokens[i], 1e4]], "ignore_eos": False})
                if "error" in reply:
                    raise MlxrtError(f"refused the prompt: {reply['error']}")
                [token] = reply["choices"][0]["logprobs"]["content"]
                if token["id"] != tokens[i]:
                    raise MlxrtError(f"sampled {token['id']} in spite of a bias for {tokens[i]}")
                losses.append(-token["logprob"])
        return {"losses": losses}

    def batch(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        def answer(request: dict[str, Any], began: float) -> dict[str, Any]:
            clock = Clock(began)
            tokens, _ = self.complete(request["prompt"], request["max_tokens"], False, clock)
            return {"tokens": tokens, "at": clock.at}

        start, used = time.perf_counter(), time.process_time()
        rows = run_clients(requests, start, answer)
        spent = {"seconds": time.perf_counter() - start, "seconds_used": time.process_time() - used}
        return {"rows": rows, **spent}


if __name__ == "__main__":
    serve(LlamaCppBackend)
