"""Any server with OpenAI's /v1/completions, by its URL. Times are a client's: the network counts.

Setting: {url, model, prompt: a few token ids, to find out whether it takes them}. Questions as in `mlxrt.py`:
generate {prompt, text, max_tokens}, batch {requests with text}. Most servers return no token ids: then `tokens` is
missing and `text` is the answer. Whether the server caches prefixes is up to it: `fresh` asks with a new prompt.
"""

import json
import time
import urllib.error
import urllib.request
from typing import Any

from mlxrt.bench.backends.serve import Served, run_clients, serve
from mlxrt.errors import MlxrtError

TIMEOUT = 120  # seconds without a byte


class OpenAIBackend(Served):
    def __init__(self, setting: dict[str, Any]):
        self.url = setting["url"].rstrip("/")
        self.model = setting.get("model") or self.first_model()
        self.takes_ids = self.accepts_ids(setting["prompt"])

    def first_model(self) -> str:
        listed = self.open("/models", None).read()
        try:
            return json.loads(listed)["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise MlxrtError(f"{self.url}/models lists no model: {listed[:80]!r}") from None

    def accepts_ids(self, ids: list[int]) -> bool:
        try:
            answer = json.loads(self.open("/completions", self.body(ids, 1)).read())
        except MlxrtError:
            return False
        return answer.get("usage", {}).get("prompt_tokens") == len(ids)

    def info(self) -> dict[str, Any]:
        how = "token ids" if self.takes_ids else "text: it takes no token ids"
        return {"engine": f"{self.model} at {self.url}", "said": [f"{self.url} is given {how}"], "load_s": None}

    def body(self, prompt: Any, max_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    def open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.url + path, data, headers=headers)
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            raise MlxrtError(f"{self.url}{path} answers {error.code}: {error.read(120)!r}") from None
        except (OSError, ValueError) as error:
            raise MlxrtError(f"no answer from {self.url}{path}: {error}; is the server running?") from None

    def generate(self, prompt: list[int], max_tokens: int, text: str = "", fresh: bool = True) -> dict[str, Any]:
        return self.complete(prompt, text, max_tokens, time.perf_counter())

    def complete(self, prompt: list[int], text: str, max_tokens: int, start: float) -> dict[str, Any]:
        if not self.takes_ids and not text:
            raise MlxrtError(f"{self.url} takes no token ids, and a model without a tokenizer has no text")
        body = self.body(prompt if self.takes_ids else text, max_tokens)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        at, pieces = [], []
        usage: dict[str, Any] = {}
        with self.open("/completions", body) as stream:
            for line in stream:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                chunk = json.loads(line[5:])
                usage = chunk.get("usage") or usage
                if piece := "".join(choice.get("text") or "" for choice in chunk.get("choices") or ()):
                    at.append(time.perf_counter() - start)
                    pieces.append(piece)
        counted = usage.get("prompt_tokens")
        if counted is not None and counted != len(prompt):
            raise MlxrtError(
                f"{self.url} saw {counted} prompt tokens, {len(prompt)} were sent; give it the same tokenizer"
            )
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return {"text": "".join(pieces), "at": at, "count": usage.get("completion_tokens", len(at)), "cached": cached}

    def batch(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        def answer(request: dict[str, Any], began: float) -> dict[str, Any]:
            return self.complete(request["prompt"], request.get("text", ""), request["max_tokens"], began)

        start = time.perf_counter()
        rows = run_clients(requests, start, answer)
        return {"rows": rows, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    serve(OpenAIBackend)
