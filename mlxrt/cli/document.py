"""What `generate --json` prints, as plain data."""

import math
from typing import TYPE_CHECKING, Any

from ..engine.request import Completion, Logprobs

if TYPE_CHECKING:
    from ..engine.engine import Engine


def document(engine: "Engine", done: Completion, peak: int) -> dict[str, Any]:
    t = done.timings
    found: dict[str, Any] = {
        "model": engine.source.name,
        "text": done.text,
        "tokens": list(done.tokens),
        "finish_reason": str(done.finish_reason),
        "cached_tokens": done.cached_tokens,
        "seed": t.seed,
        "timings": {
            "prompt_tokens": t.prompt_tokens,
            "cached_tokens": t.cached_tokens,
            "generated_tokens": t.generated_tokens,
            "prefill_tps": t.prefill_tps,
            "first_token_ms": t.first_token_s * 1e3,
            "decode_tps": t.decode_tps,
            "total_ms": t.total_s * 1e3,
            "peak_memory_bytes": peak,
        },
    }
    if done.logprobs:
        found["logprobs"] = [choices(engine, step) for step in done.logprobs]
    return found


def choices(engine: "Engine", step: Logprobs) -> list[dict[str, Any]]:
    """One step's candidates, the chosen token first. JSON has no infinity: an impossible token's number is null."""
    return [
        {
            "token": token,
            "text": engine.tokenizer.decode([token], skip_special=False),
            "logprob": value if math.isfinite(value) else None,
        }
        for token, value in step
    ]
