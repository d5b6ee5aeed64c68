"""Runs the server: sockets, start, graceful shutdown, and an exit code that tells whether an engine failed."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import BadRequest, MlxrtError
from .access import AccessControl, AccessRules
from .app import build_app
from .served_models import ServedModels

if TYPE_CHECKING:
    import uvicorn

log = logging.getLogger("mlxrt.server")

SEND_BUFFER = 16384  # bytes the kernel holds for a client: the engine notices a slow reader early
BACKLOG = 256
POLL_S = 0.25
CLOSING_S = 10  # for the last bytes to leave


@dataclass(frozen=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 8080
    path: str | None = None  # of a Unix socket, instead of host and port

    @property
    def loopback(self) -> bool:
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def open(self) -> socket.socket:
        """A listening socket; BadRequest where the address is taken or not ours."""
        try:
            sock = self._bind()
        except OSError as error:
            where, flag = (self.path, "--uds") if self.path is not None else (f"{self.host}:{self.port}", "--port")
            raise BadRequest(f"cannot listen on {where}: {error.strerror or error}; choose another {flag}") from None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # accepted sockets inherit it
        sock.listen(BACKLOG)
        return sock

    def _bind(self) -> socket.socket:
        if self.path is not None:
            remove_dead_socket(self.path)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)  # for this user only
            try:
                sock.bind(self.path)
            finally:
                os.umask(before)
            return sock
        [family, kind, protocol, _, address], *_ = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock

    def url(self, sock: socket.socket) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{sock.getsockname()[1]}"


def remove_dead_socket(path: str) -> None:
    """What a server that was killed has left behind. Anything else at the path stays, and the bind fails."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not is_listening(path):
            os.unlink(path)


def is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


@dataclass(frozen=True)
class ServeOptions:
    address: Address
    rules: AccessRules
    grace_s: float = 30.0  # running answers get so long when the server is asked to stop
    restart: bool = False  # load a failed engine again instead of ending
    log_prompts: bool = False


def serve(models: ServedModels, options: ServeOptions, announce: Callable[[str], None]) -> int:
    """Serve until a signal or a failure; 0, or 1 where an engine failed."""
    return asyncio.run(Runner(models, options, announce).run())


class Runner:
    def __init__(self, models: ServedModels, options: ServeOptions, announce: Callable[[str], None]):
        self._models, self._options, self._announce = models, options, announce
        self._closing: asyncio.Task[None] | None = None

    async def run(self) -> int:
        import uvicorn

        sock = self._options.address.open()
        app: AccessControl = build_app(self._models, self._options.rules, self._options.log_prompts)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(self._options.grace_s) + CLOSING_S,
            server_header=False,
        )
        server = uvicorn.Server(config)
        # uvicorn would raise the signal again when it is done, and end the process before the engines are closed.
        server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
        self._handle_signals(server)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        monitoring = asyncio.create_task(self._monitor(server, sock))
        idle = asyncio.create_task(self._models.unload_idle())
        try:
            await serving
        finally:
            for task in (monitoring, idle):
                task.cancel()
            results = await asyncio.gather(monitoring, idle, return_exceptions=True)
            await self._models.close(finish=False)
            if self._options.address.path is not None:
                remove_dead_socket(self._options.address.path)
        failed = next((r for r in results if isinstance(r, Exception)), None) or self._models.failure
        if failed is not None:
            log.error(f"the server stops: {failed if isinstance(failed, MlxrtError) else repr(failed)}")
            return 1
        return 0

    def _handle_signals(self, server: "uvicorn.Server") -> None:
        """The first asks the server to end, a second one to end at once."""

        def stop() -> None:
            server.force_exit = self._models.stopping
            self._models.stop()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop)

    async def _monitor(self, server: "uvicorn.Server", sock: socket.socket) -> None:
        """Whatever ends the monitoring ends the server: it would look alive and hear no signal."""
        try:
            await self._wait_for_end(server, sock)
        finally:
            server.should_exit = True

    async def _wait_for_end(self, server: "uvicorn.Server", sock: socket.socket) -> None:
        """Load the first model, say where it is served, then wait for an engine's failure or a signal."""
        model = await self._models.start()
        self._announce(describe_start(self._options.address.url(sock), model))
        while True:
            await asyncio.sleep(POLL_S)
            server.should_exit = server.should_exit or self._models.stopping
            if server.should_exit and not self._models.closing:
                self._models.closing = True
                asyncio.get_running_loop().call_later(self._options.grace_s, self._end_answers)
            if self._models.find_failure() is None:
                continue
            if self._options.restart:
                await self._models.restart_failed()
                continue
            await asyncio.sleep(1.0)  # every client has got its error by then
            return

    def _end_answers(self) -> None:
        """Their time is over: whoever still waits is told so."""
        self._closing = asyncio.create_task(self._models.close(finish=False))


def describe_start(url: str, model) -> str:
    inner = model.engine.engine
    limit = inner.core.memory.limit
    return f"{url} serves {model.name}, context {inner.context} tokens, memory up to {limit / 2**30:.1f} GB"
