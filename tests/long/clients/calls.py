"""What the programs of this folder share: each prints one line of JSON for every call that it made."""

import json
import os
import traceback
from collections.abc import Callable

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


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False
