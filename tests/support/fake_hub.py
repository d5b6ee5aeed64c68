"""A hub on the loopback: repositories as dictionaries, the few routes a download uses, faults on request.

It keeps a log of every request, so that tests can say what was asked for and how many bytes were served.
"""

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


def commit_of(files: dict[str, bytes]) -> str:
    listed = [(name, hashlib.sha256(content).hexdigest()) for name, content in sorted(files.items())]
    return hashlib.sha1(repr(listed).encode()).hexdigest()


def etag_of(name: str, content: bytes) -> str:
    """The hub's: sha256 of large files, git's blob id of the others."""
    if name.endswith((".safetensors", ".gguf")):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Hub:
    """What the server serves and what it has seen."""

    repos: dict[str, dict[str, dict[str, bytes]]]  # id -> revision -> name -> content
    private: dict[str, str] = field(default_factory=dict)  # id -> the token that opens it
    gated: set[str] = field(default_factory=set)
    broken: dict[str, int] = field(default_factory=dict)  # id -> status of everything about it
    cuts: dict[str, list[int]] = field(default_factory=dict)  # file -> after how many bytes each GET of it is cut
    lost: dict[str, int] = field(default_factory=dict)  # file -> status of its GET
    html: bool = False  # a captive portal: 200 and a page for everything
    log: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range header
    served: Counter[str] = field(default_factory=Counter)  # bytes of GETs by file
    address: str = ""

    def fetched(self) -> set[str]:
        return {path.rpartition("/")[2] for method, path, _ in self.log if method == "GET" and "/resolve/" in path}

    def ranges(self, name: str) -> list[str]:
        return [found for method, path, found in self.log if method == "GET" and path.endswith("/" + name)]


class Door(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments):
        """Silence: the log is kept in the hub."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.log.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.html:
            return self.send(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        if (refused := self.refusal(repo)) is not None:
            return self.send(*refused)
        revision = rest[1] if len(rest) > 1 else "main"
        revisions = self.hub.repos[repo]
        files = revisions.get(revision) or next((f for f in revisions.values() if commit_of(f) == revision), None)
        if files is None:
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if api:
            return self.describe(repo, files, tree=bool(rest) and rest[0] == "tree")
        return self.resolve(files, "/".join(rest[2:]), body)

    def refusal(self, repo: str) -> tuple[int, bytes, dict[str, str]] | None:
        given = self.headers.get("Authorization", "")
        if status := self.hub.broken.get(repo):
            return status, b"", {}
        if repo in self.hub.gated:
            return 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask for access"}
        if repo in self.hub.private and given != f"Bearer {self.hub.private[repo]}":
            return 401, b"", {"X-Error-Message": "Invalid username or password."}
        if repo not in self.hub.repos:
            return 404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        return None

    def describe(self, repo: str, files: dict[str, bytes], tree: bool):
        if tree:
            listed = [self.file_info(name, content) for name, content in files.items()]
            return self.send_json(listed)
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        return self.send_json({"id": repo, "sha": commit_of(files), "siblings": siblings})

    def file_info(self, name: str, content: bytes) -> dict:
        info = {"type": "file", "path": name, "size": len(content), "oid": etag_of("x", content)}
        if name.endswith((".safetensors", ".gguf")):
            info["lfs"] = {"oid": etag_of(name, content), "size": len(content), "pointerSize": 130}
        return info

    def resolve(self, files: dict[str, bytes], name: str, body: bool):
        if name not in files:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = files[name]
        headers = {"ETag": f'"{etag_of(name, content)}"', "X-Repo-Commit": commit_of(files), "Accept-Ranges": "bytes"}
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if not body:
            return self.send(200, content, headers, body=False)
        if status := self.hub.lost.get(name):
            return self.send(status, b"", {})
        cuts = self.hub.cuts.get(name)
        kept = content[start:][: cuts.pop(0)] if cuts else content[start:]
        self.hub.served[name] += len(kept)
        self.send(206 if asked else 200, content[start:], headers, only=kept)

    def send_json(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, headers: dict[str, str], body: bool = True, only: bytes | None = None):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(content if only is None else only)
        if only is not None and len(only) < len(content):
            self.wfile.flush()
            self.close_connection = True  # fewer bytes than promised: the client sees the connection end


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubDoor", (Door,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
