"""A side's half of the conversation. Imports no mlxrt: it would load a BLAS into engines that shall not have it."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(reply: Callable[[dict[str, Any]], Any]) -> None:
    """Answer the questions on stdin until there are no more. Anything else printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(reply(json.loads(line))), file=out, flush=True)
