"""Who may talk to the server, and the frame around every request: Host and Origin checks, keys, body size, ids, log.

Pure ASGI middleware, outermost first. A web page of another origin can send a POST to a server on this machine without
asking it first, so `Host` and `Origin` are checked before a body is read.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from h11 import LocalProtocolError
from starlette.requests import ClientDisconnect

from ..engine.async_timeout import RepeatedTimeout
from .problem import CLIENT_LEFT, WRITERS, Problem, describe, encode_json, protocol_of

log = logging.getLogger("mlxrt.server")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN_PATHS = ("/", "/health", "/ready", "/favicon.ico")  # without a key: they tell nothing about anybody's requests
OPEN_PREFIX = "/page/"
EXPOSED = b"x-request-id, request-id, x-mlxrt-ignored, retry-after, x-should-retry"  # what pages may read
SEND_TIMEOUT_S = 120.0
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True)
class AccessRules:
    """What the operator allowed."""

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()  # of pages that may call, besides the server's own
    hosts: tuple[str, ...] = ()  # names, besides those of the loopback device and of the bound address
    check_host: bool = True  # bound to this machine only, or the operator has named hosts
    max_body: int = 32 << 20
    open_metrics: bool = False
    isolate: bool = False  # clients with different keys share no cached prefix


class AccessControl:
    """Checks every request, gives it an id, and turns a `Problem` into its protocol's error."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], rules: AccessRules):
        self.app, self.rules = app, rules
        self._keys = [hashlib.sha256(key.encode()).digest() for key in rules.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(request_id=request_id, cache_salt="")
        answer = Answer(send, request_id, self._cors(headers))
        began = time.perf_counter()
        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS":
                await answer.plain(204, b"")
            else:
                await self.app(scope, Body(receive, self.rules.max_body), answer)
        except Exception as error:  # a request boundary: whatever a handler did, its client gets an answer
            problem = describe(error)
            if problem.status == 500:
                log.exception(f"{request_id}: {scope['method']} {scope['path']}")
            if problem.status == CLIENT_LEFT:
                return
            if answer.status is None:
                await answer.problem(problem, protocol_of(scope["path"]))
            elif not answer.complete:
                raise  # half an answer is out: only closing the connection can tell
        finally:
            answer.timeout.close()
            ms = (time.perf_counter() - began) * 1000
            log.info(f"{scope['method']} {scope['path']} {answer.status or 499} {ms:.0f} ms {request_id}")

    def _cors(self, headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
        origin = headers.get("origin")
        if origin is None or origin not in self.rules.origins:
            return []
        found = [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"origin, access-control-request-headers"),
        ]
        # Clients' packages send headers of their own (x-stainless-..., anthropic-version); none of them gives rights.
        if asked := headers.get("access-control-request-headers"):
            found.append((b"access-control-allow-headers", asked.encode("latin-1")))
        return found

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        host, origin, path = headers.get("host"), headers.get("origin"), scope["path"]
        if self.rules.check_host and host is not None and not self._known_host(host):
            raise Problem(
                403, f"the Host {host[:80]!r} is not this server; allow it with --allow-host", "permission_error"
            )
        same = origin is not None and host is not None and split_address(origin).netloc == host
        if origin is not None and not same and origin not in self.rules.origins:
            text = f"pages of {origin[:80]!r} may not use this server; allow them with --allow-origin"
            raise Problem(403, text, "permission_error")
        if headers.get("sec-fetch-site") == "cross-site" and origin is None:
            raise Problem(403, "a page of another site may not use this server", "permission_error")
        open_path = (
            path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or (path == "/metrics" and self.rules.open_metrics)
        )
        if self._keys and not open_path and scope["method"] != "OPTIONS":
            digest = self._check_key(headers)
            if self.rules.isolate:
                scope["state"]["cache_salt"] = digest.hex()
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.rules.max_body:  # before any of it is read
            raise too_large(self.rules.max_body)

    def _known_host(self, host: str) -> bool:
        name = split_address(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost") or name in self.rules.hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def _check_key(self, headers: dict[str, str]) -> bytes:
        """The digest of the key that was given."""
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        # Every key is compared, in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            raise Problem(401, "Incorrect API key provided", "authentication_error", "invalid_api_key")
        return digest


class Body:
    """`receive` that refuses a body over the limit, announced or not."""

    def __init__(self, receive: Receive, limit: int):
        self._receive, self._limit, self._size = receive, limit, 0

    async def __call__(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                raise too_large(self._limit)
        return message


def split_address(text: str) -> SplitResult:
    """The parts of an address; none where it is no address at all."""
    try:
        return urlsplit(text)
    except ValueError:
        return urlsplit("")


def too_large(limit: int) -> Problem:
    return Problem(413, f"the body is larger than {limit} bytes", "request_too_large", "request_too_large")


class Answer:
    """`send` that adds the request's id and remembers the status."""

    def __init__(self, send: Send, request_id: str, headers: Iterable[tuple[bytes, bytes]]):
        self._send, self._request_id = send, request_id
        id = request_id.encode("latin-1")
        self._headers = [(b"x-request-id", id), (b"request-id", id), (b"x-content-type-options", b"nosniff"), *headers]
        self.status: int | None = None
        self.complete = False
        self.timeout = RepeatedTimeout()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        status = self.status
        if message["type"] == "http.response.start":
            status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        with self.timeout.within(SEND_TIMEOUT_S):  # a reader that takes nothing must not hold its memory for ever
            try:
                await self._send(message)
            except LocalProtocolError as error:  # uvicorn has refused the rest of the body already, and closes
                raise ClientDisconnect from error
        self.status = status
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def problem(self, problem: Problem, protocol: str) -> None:
        body = encode_json(WRITERS[protocol](problem, self._request_id))
        await self.plain(problem.status, body, "application/json", problem.headers)

    async def plain(self, status: int, body: bytes, kind: str = "", headers: dict[str, str] | None = None) -> None:
        fields = {"content-length": str(len(body)), **({"content-type": kind} if kind else {}), **(headers or {})}
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]
        await self({"type": "http.response.start", "status": status, "headers": raw})
        await self({"type": "http.response.body", "body": body})
