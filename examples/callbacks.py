"""Watch an engine and edit logits: python examples/callbacks.py [MODEL]

`on_event` is called for every request that is queued, started, preempted or finished; `on_logits` sees and edits one
request's logits at every step, before sampling.
"""

import sys

import mlxrt

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def on_event(event: mlxrt.EngineEvent) -> None:
    print(f"request {event.id}: {event.kind}, {event.generated_tokens} tokens")


def ban_token(token: int):
    def on_logits(row: mlxrt.LogitsRow) -> None:
        row.ban([token])

    return on_logits


with mlxrt.load(MODEL, on_event=on_event) as engine:
    plain = engine.generate("The capital of France is", max_tokens=6, logprobs=2)
    for step in plain.logprobs:
        print([(token, round(logprob, 3)) for token, logprob in step])
    first = plain.tokens[0]
    edited = engine.generate("The capital of France is", max_tokens=6, on_logits=ban_token(first))
    assert first not in edited.tokens
    print(f"{plain.text!r} without token {first}: {edited.text!r}")
