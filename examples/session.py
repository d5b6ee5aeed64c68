"""Fork, rewind, save and restore a conversation with its KV cache: python examples/session.py [MODEL]"""

import sys
import tempfile
from pathlib import Path

import mlxrt

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "conversation.state"
    with mlxrt.load(MODEL) as engine:
        session = engine.session(system="Be brief.", max_tokens=24)
        print(session.say("What is the capital of France?").text)
        other = session.fork()  # shares the computed prefix, copies nothing
        print("fork:", other.say("And of Italy?").text)
        reply = session.say("And of Spain?")
        print("original:", reply.text, f"({reply.completion.cached_tokens} tokens reused)")
        session.rewind(1)  # without the last question and answer
        session.save(path)
    with mlxrt.load(MODEL) as engine:  # another process could do this
        restored = mlxrt.Session.restore(engine, path, max_tokens=24)
        reply = restored.say("And of Spain?")
        print("restored:", reply.text, f"({reply.completion.cached_tokens} tokens reused)")
