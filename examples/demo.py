"""A real model answers a question and a follow-up: what `make demo` runs.

Exit 0: the answer names Paris. The model is fetched once, by `mlxrt.load`, and found in the cache afterwards.
"""

import sys

import mlxrt

QUESTION = "What is the capital of France? Answer in one sentence."
FOLLOW_UP = "Which river flows through it?"


def ask(session: mlxrt.Session, question: str) -> mlxrt.Completion:
    """Show the answer while it comes, and what it cost."""
    print(f"> {question}")
    reply = session.say(question)
    for event in reply:
        print(event.text, end="", flush=True)
    done = reply.completion
    t = done.timings
    speeds = [f"prefill {t.prefill_tps:.1f} tok/s", f"first token {t.first_token_s * 1e3:.0f} ms"]
    if t.decode_tps:
        speeds.append(f"decode {t.decode_tps:.1f} tok/s")
    print(f"\n  [{', '.join(speeds)}; {t.cached_tokens} of {t.prompt_tokens} prompt tokens reused]\n")
    return done


def main() -> int:
    try:
        with mlxrt.load("smollm2") as engine:
            session = engine.session(max_tokens=64)
            first = ask(session, QUESTION)
            second = ask(session, FOLLOW_UP)
    except mlxrt.MlxrtError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    print(f"The second turn reused {second.cached_tokens} tokens that the first had computed.")
    print(f"To the first question the model said: {first.text.strip()}")
    if "Paris" not in first.text:
        print("demo: that is wrong, it is Paris; this should not happen with the default model", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
