"""What the programs of this folder share: each prints one line of JSON for every call that it made."""

import json
import os
import re
import time
import traceback
from collections.abc import Callable
from urllib.request import urlopen

URL, MODEL = os.environ["MLXRT_URL"], os.environ.get("MLXRT_MODEL", "smollm2")
QUESTION = "What is the capital of France? Answer in one word."
SCHEMA = {
    "title": "City",
    "description": "a city",
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["name"],
    "additionalProperties": False,
}
STORY = "Tell me a very long story about a ship and its crew, with many chapters."
TOOL = {"type": "function", "function": {"name": "visit", "description": "visit a city", "parameters": SCHEMA}}


def check(name: str, call: Callable[[], object]) -> None:
    """One call: it is right when it gives something true."""
    try:
        found = call()
        result = {"call": name, "ok": bool(found), "note": "" if found else f"gave {found!r}"}
    except Exception as error:  # a client may raise anything; it goes into the table
        last = traceback.extract_tb(error.__traceback__)[-1]
        result = {"call": name, "ok": False, "note": f"{type(error).__name__}: {error} ({last.name})"[:300]}
    print(json.dumps(result), flush=True)


def raises(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def becomes_idle(limit_s: float = 30.0) -> bool:
    """Does the server stop computing: the client has left."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        metrics = urlopen(f"{URL}/metrics").read().decode()
        if not any(map(float, re.findall(r"^vllm:num_requests_(?:running|waiting)\S* (\S+)$", metrics, re.M))):
            return True
        time.sleep(0.1)
    return False
