"""Stream a completion token by token: python examples/stream.py [MODEL]"""

import sys

import mlxrt

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

with mlxrt.load(MODEL) as engine:
    stream = engine.stream("Once upon a time", max_tokens=32, temperature=0.8, seed=1)
    for event in stream:  # closing the stream, or leaving the loop and dropping it, cancels the request
        print(event.text, end="", flush=True)
        last = event
    print(f"\n[{last.finish_reason}, {last.timings.generated_tokens} tokens, {last.timings.decode_tps:.1f} tok/s]")
