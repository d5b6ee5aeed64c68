"""Mutated HTTP requests against the server: no 500, no traceback, no hang, and the next good request is answered.

    python -m tests.long.fuzz_server --count 5000 --seed 1

Bodies, headers, framing, chunks, invalid UTF-8, huge numbers, deep JSON; every failure is printed with its bytes.
"""

# ruff: noqa: E501  tables of odd values
import argparse
import copy
import json
import logging
import random
import select
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlxrt import EngineConfig
from tests.server.conftest import Server, running

TIMEOUT_S = 60.0  # a request that takes longer hangs
PATIENCE_S = 0.3  # then a request that may be incomplete gets its end
GOOD = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CLAUDE_TOOL = {"name": "f", "input_schema": TOOL["parameters"]}
HISTORY = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": TOOL}]},
    {"role": "tool", "tool_call_id": "1", "content": "r"},
    {"role": "user", "content": "go"},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "r"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]}],
    },
]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["x"], "logit_bias": {"1": 2.0}}
BASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", GOOD | SAMPLING | {"n": 2, "logprobs": True, "top_logprobs": 2, "stream": True}),
    ("/v1/chat/completions", GOOD | {"messages": HISTORY, "tools": [{"type": "function", "function": TOOL}]}),
    ("/v1/chat/completions", GOOD | {"stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1}}),
    ("/v1/chat/completions", GOOD | {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
    ("/v1/completions", {"model": "toy", "prompt": ["ab", [1, 2, 3]], "max_tokens": 2, "logprobs": 1, "echo": True}),
    ("/v1/responses", {"model": "toy", "input": ITEMS, "max_output_tokens": 2, "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"model": "toy", "input": "x", "tools": [{"type": "function", **TOOL}], "stream": True}),
    ("/v1/messages", {"model": "toy", "messages": BLOCKS, "max_tokens": 2, "system": [{"type": "text", "text": "s"}]}),
    (
        "/v1/messages",
        GOOD | {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "auto"}, "thinking": {"type": "adaptive"}},
    ),
    ("/v1/messages/count_tokens", {"model": "toy", "messages": BLOCKS}),
    ("/api/chat", {"model": "toy", "messages": HISTORY[:2], "options": {"num_predict": 2, "seed": 1}, "think": False}),
    ("/api/generate", {"model": "toy", "prompt": "ab", "system": "s", "options": {"num_predict": 2}, "format": "json"}),
    ("/api/show", {"model": "toy"}),
    ("/api/pull", {"model": "toy"}),
    ("/v1/cache/warm", {"model": "toy", "prompt": "ab"}),
    ("/v1/requests/none/cancel", {}),
]
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**70, -(2**70), 10**400, 1e308, -1e308, 1e-320, 0.1, "", "x", "x" * 3000,
    "\x00", "\ud800", "\U0010ffff", "<|im_end|>", "none", "auto", "text", [], {}, [[]], [None], [{}], {"a": None},
    {"type": "text"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}, [1, "2"], {"": {}}, [[1], []],
]  # fmt: skip
NAMES = """temperature top_p top_k min_p stop tools tool_choice system n seed options format logprobs response_format
    thinking think metadata messages prompt input stream timeout logit_bias max_tokens stop_token_ids functions echo
    suffix best_of reasoning reasoning_effort text keep_alive images raw template context model name cache_salt""".split()
METHODS = ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW", "post", "CONNECT", "TRACE"]
PATHS = [
    "/",
    "//",
    "/v1",
    "/v1/",
    "/%00",
    "/%ff%fe",
    "/..%2f..%2fetc/passwd",
    "/v1/models/a/b",
    "/page/%2e%2e",
    "*",
    "/a?b=%zz",
]


class Mutator:
    """Makes the bytes of requests, most of them wrong."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.kinds: list[Callable[[], bytes]] = [
            self.change_field, self.change_field, self.change_field, self.change_field, self.add_fields, self.change_bytes,
            self.write_odd_json, self.change_header, self.change_framing, self.change_chunks, self.change_target,
        ]  # fmt: skip

    def make(self) -> tuple[str, bytes]:
        kind = self.rng.choice(self.kinds)
        return kind.__name__, kind()

    def base(self) -> tuple[str, dict[str, Any]]:
        path, body = self.rng.choice(BASES)
        return path, copy.deepcopy(body)

    def write(self, path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> bytes:
        fields = {"host": "localhost", "connection": "close", "content-length": str(len(body)), **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body

    def change_field(self) -> bytes:
        """Some values anywhere in a body become odd ones, or vanish."""
        path, body = self.base()
        for _ in range(self.rng.randint(1, 3)):
            holder: Any = body
            while True:
                keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
                if not keys:
                    break
                key = self.rng.choice(keys)
                if isinstance(holder[key], (dict, list)) and holder[key] and self.rng.random() < 0.7:
                    holder = holder[key]
                    continue
                if self.rng.random() < 0.15:
                    del holder[key]
                else:
                    holder[key] = copy.deepcopy(self.rng.choice(ODD))
                break
        return self.write(path, dump(body))

    def add_fields(self) -> bytes:
        path, body = self.base()
        body |= {self.rng.choice(NAMES): copy.deepcopy(self.rng.choice(ODD)) for _ in range(self.rng.randint(1, 3))}
        return self.write(path, dump(body))

    def change_bytes(self) -> bytes:
        path, body = self.base()
        raw = bytearray(dump(body))
        for _ in range(self.rng.randint(1, 8)):
            at = self.rng.randrange(len(raw) or 1)
            act = self.rng.randrange(4)
            if act == 0 and raw:
                raw[at] = self.rng.randrange(256)
            elif act == 1:
                raw[at:at] = self.rng.choice([b"\xff\xfe", b"\xc3", b"\x00", b'"', b"{", b"\xed\xa0\x80", b"\\u12"])
            elif act == 2:
                del raw[at : at + self.rng.randint(1, 20)]
            else:
                raw += raw[at : at + 30]
        return self.write(path, bytes(raw))

    def write_odd_json(self) -> bytes:
        path, _ = self.base()
        deep = self.rng.choice([50, 199, 201, 900, 5000, 200_000])
        number = "9" * self.rng.choice([20, 400, 5000])
        raw = self.rng.choice(
            [
                "[" * deep, '{"messages":' + "[" * deep + "]" * deep + "}", '{"a":' * deep + "1" + "}" * deep, "NaN",
                '{"model":"toy","messages":[{"role":"user","content":"a"}],"max_tokens":' + number + "}",
                '{"model":"toy","prompt":"a","temperature":1e' + number[:6] + "}", '{"temperature":-Infinity}', "﻿{}", "", " ",
                '{"model":"toy","model":"other","prompt":"a"}', '{"messages":[{"role":"user","content":"\\ud83d"}]}', "0",
            ]
        )  # fmt: skip
        return self.write(path, raw.encode())

    def change_header(self) -> bytes:
        path, body = self.base()
        odd = self.rng.choice(
            [
                {"host": self.rng.choice(["", "evil.example", "[::1", "localhost:99999999", "a" * 300, "127.0.0.1@x", "[zz]"])},
                {"origin": self.rng.choice(["null", "http://evil.example", "http://[", "x", "http://localhost"])},
                {"content-type": self.rng.choice(["text/plain", "multipart/form-data", "a/b; charset=utf-16", "\x01"])},
                {"authorization": self.rng.choice(["Bearer", "Basic eDp5", "Bearer \xff\xfe", "x" * 5000])},
                {"x-request-id": self.rng.choice(["", "a" * 500, "\xe9", "a b", "../../x"])},
                {"x-request-timeout": self.rng.choice(["nan", "inf", "-1", "0", "1e400", "x", "1_0", "٣"])},
                {"accept-encoding": "gzip;q=x", "te": "trailers"}, {"x-long": "y" * 70_000}, {"x-null": "a\x00b"},
                {"expect": "100-continue"}, {"upgrade": "websocket", "connection": "upgrade"}, {"sec-fetch-site": "cross-site"},
                {f"x-many-{i}": "y" for i in range(300)}, {"content-encoding": "gzip"}, {"bad name": "x"}, {"": "x"},
            ]
        )  # fmt: skip
        return self.write(path, dump(body), odd)

    def change_framing(self) -> bytes:
        """Lengths and request lines that are wrong."""
        path, body = self.base()
        raw = dump(body)
        length = self.rng.choice(
            ["-1", "x", "0", "1", str(len(raw) - 1), str(len(raw) + 50), "9" * 30, "1e3", "+5", ""]
        )
        request = self.write(path, raw, {"content-length": length})
        act = self.rng.randrange(5)
        if act == 0:
            request = request.replace(
                b"HTTP/1.1", self.rng.choice([b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"HTTP/1.1 x"])
            )
        elif act == 1:
            request = request.replace(
                b"\r\n", self.rng.choice([b"\n", b"\r", b"\r\n ", b"\r\n\r\n"]), self.rng.randint(1, 5)
            )
        elif act == 2:
            request = request[: self.rng.randrange(len(request))]
        elif act == 3:
            request = bytes(self.rng.randrange(256) for _ in range(self.rng.randint(1, 300)))
        return request

    def change_chunks(self) -> bytes:
        path, body = self.base()
        raw = dump(body)
        head = self.write(path, b"", {"transfer-encoding": "chunked"}).replace(b"content-length: 0\r\n", b"")
        half = len(raw) // 2
        good = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (half, raw[:half], len(raw) - half, raw[half:])
        wrong = [
            good, b"zz\r\n" + raw, b"-5\r\n" + raw, b"ffffffffffffffff\r\n" + raw, b"%x;ext=1\r\n%b\r\n0\r\n\r\n" % (len(raw), raw),
            good.replace(b"0\r\n\r\n", b"0\r\nx-trailer: y\r\n\r\n"), good[:-3], b"5\r\n" + raw, b"0\r\n\r\n", b"\r\n\r\n", b"",
        ]  # fmt: skip
        return head + self.rng.choice(wrong)

    def change_target(self) -> bytes:
        path, body = self.base()
        path = self.rng.choice([path, *PATHS, path + "/x", path * 400, path + "?" + "a=b&" * 50])
        return self.write(path, dump(body), method=self.rng.choice([*METHODS, "POST"]))


def dump(body: Any) -> bytes:
    return json.dumps(body).encode()


class Records(logging.Handler):
    """What was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.levelno >= logging.ERROR and not record.name.startswith("uvicorn")  # it tells of bad chunks
        if record.exc_info or ours:
            self.found.append(f"{record.name}: {record.getMessage()} {record.exc_info or ''}")


def exchange(address: tuple[str, int], request: bytes, patience: float = TIMEOUT_S) -> bytes:
    """Everything the server answers until it closes; TimeoutError where it hangs. No more comes after `patience`."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        answer = b""
        with suppress(ConnectionResetError, BrokenPipeError):  # it need not read what it refuses
            connection.sendall(request)
            if not select.select([connection], [], [], patience)[0]:  # it may wait for the rest of a body
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        return answer


def fuzz(server: Server, count: int, seed: int) -> list[str]:
    """What was wrong, in words."""
    rng = random.Random(seed)
    mutator, records, wrong, statuses = Mutator(rng), Records(), [], Counter()
    host, port = server.url.removeprefix("http://").split(":")
    address = (host, int(port))
    good = mutator.write("/v1/chat/completions", dump(GOOD))
    content = json.loads(exchange(address, good).split(b"\r\n\r\n", 1)[1])["choices"]
    loggers = [logging.getLogger(name) for name in ("mlxrt", "mlxrt.server", "uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(records)
    try:
        for i in range(count):
            kind, request = mutator.make()
            try:
                answer = exchange(address, request, PATIENCE_S)
            except TimeoutError:
                wrong.append(f"{kind}: no answer in {TIMEOUT_S:g} s: {request[:2000]!r}")
                break
            status = answer[9:12].decode("latin-1") if answer else "closed"
            statuses[status] += 1
            if (status.startswith("5") and status not in ("501", "505")) or b"Traceback" in answer:
                wrong.append(f"{kind}: {answer[:300]!r} for {request[:2000]!r}")
            if records.found:
                wrong.append(f"{kind}: logged {records.found} for {request[:2000]!r}")
                records.found.clear()
            if i % 50 == 49 and json.loads(exchange(address, good).split(b"\r\n\r\n", 1)[1])["choices"] != content:
                wrong.append(f"after {kind} a good request is answered differently: {request[:2000]!r}")
    finally:
        for logger in loggers:
            logger.removeHandler(records)
    print(f"{count} requests, answers: {dict(sorted(statuses.items()))}", file=sys.stderr)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with running(config=EngineConfig(chunk=16, max_context=160)) as server:
        wrong = fuzz(server, args.count, args.seed)
        stats = server.engine.stats()
    if stats.running or stats.waiting:
        wrong.append(f"{stats.running} requests are still running, {stats.waiting} waiting")
    print("\n".join(wrong) or "nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
