"""A file of prompts, one JSON value a line, each checked before a model is loaded. Knows no engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..engine.request import SamplingParams
from ..errors import BadRequest, shown
from .prompt import decoded

SOURCES = ("prompt", "messages", "tokens")
OWN = ("tools", "enable_thinking", "priority", "deadline_s", "id")
SAMPLING = tuple(f.name for f in fields(SamplingParams))
TOLD = 5  # bad lines named at once


@dataclass(frozen=True)
class Job:
    line: int
    source: str  # prompt, messages or tokens
    value: Any
    sampling: Mapping[str, Any]
    options: Mapping[str, Any]  # the others, as Request takes them
    id: Any = None  # the user's own name for it, given back


def read_jobs(path: str) -> list[Job]:
    try:
        text = decoded(Path(path).read_bytes(), path)
    except OSError as bad:
        raise BadRequest(f"--prompts {path}: {bad.strerror}") from None
    jobs: list[Job] = []
    wrong: list[str] = []
    for n, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            jobs.append(read_job(n, line))
        except BadRequest as bad:
            wrong.append(f"line {n}: {bad}")
    if wrong:
        more = f"; and {len(wrong) - TOLD} lines more" if len(wrong) > TOLD else ""
        raise BadRequest(f"--prompts {path}: {'; '.join(wrong[:TOLD])}{more}; nothing was run")
    if not jobs:
        raise BadRequest(f"--prompts {path} holds no prompt; write one JSON value a line")
    return jobs


def read_job(n: int, line: str) -> Job:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as bad:
        raise BadRequest(f"not JSON ({bad})") from None
    found = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise BadRequest(f"expected a text or an object, found {shown(json.dumps(value)[:60])}")
    if unknown := found.keys() - {*SOURCES, *OWN, *SAMPLING}:
        raise BadRequest(f"nobody knows {', '.join(map(shown, sorted(unknown)))}")
    given = [name for name in SOURCES if name in found]
    if len(given) != 1:
        raise BadRequest(f"exactly one of prompt, messages, tokens is needed, found {given or 'none'}")
    [source] = given
    check_source(source, found[source])
    sampling = {k: v for k, v in found.items() if k in SAMPLING}
    if isinstance(sampling.get("logit_bias"), dict):  # JSON has no numbers as keys
        sampling["logit_bias"] = {whole(k): v for k, v in sampling["logit_bias"].items()}
    try:
        SamplingParams(**sampling)
    except (TypeError, ValueError) as bad:
        raise BadRequest(f"a sampling option has the wrong type ({bad})") from None
    options = {k: v for k, v in found.items() if k in OWN and k != "id"}
    return Job(n, source, found[source], sampling, options, found.get("id"))


def whole(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() else key


def check_source(name: str, value: Any) -> None:
    right = {
        "prompt": isinstance(value, str),
        "messages": isinstance(value, list) and all(isinstance(m, dict) for m in value),
        "tokens": isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value),
    }
    if not right[name] or not value:
        wanted = {"prompt": "a text", "messages": "a list of objects", "tokens": "a list of whole numbers"}[name]
        raise BadRequest(f"{name} must be {wanted}, not empty")
