"""The models a server offers: loaded when first asked for, unloaded when idle or when another needs the memory.

Only names that the operator gave are served; a request never makes the server fetch anything.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ..config import EngineConfig
from ..engine.async_engine import AsyncEngine
from ..errors import EngineFailed
from .problem import Problem

log = logging.getLogger("mlxrt.server")

IDLE_CHECK = 1.0  # seconds between two looks at what is idle

Load = Callable[[str, EngineConfig], AsyncEngine]


@dataclass
class ServedModel:
    """A name, where its model comes from, and its engine while it is loaded."""

    name: str
    source: str
    engine: AsyncEngine | None = None
    users: int = 0  # requests that are using the engine
    last_used: float = 0.0
    loaded_at: float = 0.0
    load_s: float = 0.0
    leaving: bool = False  # to be unloaded when nobody uses it any more
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServedModels:
    """`aliases` are further names of the first model; with `any_name` every unknown name means it too."""

    def __init__(
        self,
        sources: Mapping[str, str],
        config: EngineConfig,
        load: Load,
        aliases: tuple[str, ...] = (),
        any_name: bool = False,
        max_models: int = 1,
        idle_s: float | None = None,
    ):
        self.models = {name: ServedModel(name, source) for name, source in sources.items()}
        self.config, self._load, self.any_name = config, load, any_name
        self.default = next(iter(self.models.values()))
        self.aliases = dict.fromkeys(aliases, self.default.name)
        self._max, self._idle_s = max_models, idle_s
        self.closing = self.starting = self.stopping = False
        self.failure: BaseException | None = None
        self.created = int(time.time())
        self._loading = asyncio.Lock()  # one at a time: two loads would not know of each other's memory

    def find(self, name: str | None) -> ServedModel:
        """The model a request names; the first one where it names none."""
        if name is None or name == "":
            return self.default
        known = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        if known is None and name.endswith(":latest"):  # how Ollama's clients complete a name
            known = self.models.get(name.removesuffix(":latest"))
        if known is None and self.any_name:
            known = self.default
        if known is None:
            served = ", ".join(self.models)
            text = f"The model `{name[:120]}` does not exist; this server has: {served}"
            raise Problem(404, text, code="model_not_found", param="model")
        return known

    async def start(self) -> ServedModel:
        """Load the first model. Until then requests are answered with 503."""
        self.starting = True
        try:
            await self._ensure(self.default)
        finally:
            self.starting = False
        return self.default

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[tuple[ServedModel, AsyncEngine]]:
        """The model and its engine, which stays loaded until the block ends."""
        model = self.find(name)
        self._check_open()
        model.users += 1
        try:
            yield model, await self._ensure(model)
        except EngineFailed as error:
            self.failure = self.failure or error
            raise
        finally:
            model.users -= 1
            model.last_used = time.monotonic()
            if model.leaving and not model.users:
                await self.release(model)

    def _check_open(self) -> None:
        if self.closing:
            raise Problem(503, "the server is shutting down", "unavailable_error", headers={"retry-after": "5"})
        if self.starting:
            raise Problem(503, "the model is being loaded", "unavailable_error", headers={"retry-after": "2"})
        if self.failure is not None:
            text = f"the engine has failed: {self.failure}"
            raise Problem(503, text, "engine_failed", headers={"x-should-retry": "false"})

    async def _ensure(self, model: ServedModel) -> AsyncEngine:
        if model.engine is not None:
            return model.engine
        async with model.lock:
            if model.engine is None:
                async with self._loading:
                    await self._make_space()
                    began = time.monotonic()
                    log.info(f"loading {model.name} from {model.source}")
                    model.engine = await asyncio.to_thread(self._load, model.source, self.config)
                    model.loaded_at, model.last_used = time.time(), time.monotonic()
                    model.load_s = model.last_used - began
        return model.engine

    async def _make_space(self) -> None:
        """Unload the models that were not used for the longest time, until one more may be loaded."""
        loaded = [m for m in self.models.values() if m.engine is not None]
        while len(loaded) >= self._max:
            idle = [m for m in loaded if not m.users]
            if not idle:
                names = ", ".join(m.name for m in loaded)
                text = f"{names} is answering and --max-models is {self._max}; try again when it is done"
                raise Problem(503, text, "unavailable_error", headers={"retry-after": "5"})
            oldest = min(idle, key=lambda m: m.last_used)
            await self._unload(oldest)
            loaded.remove(oldest)

    async def release(self, model: ServedModel) -> None:
        """Unload a model, once the requests that use it are done."""
        model.leaving = True
        if not model.users:
            await self._unload_unused(model)

    async def _unload_unused(self, model: ServedModel, unused_s: float = 0.0) -> None:
        """Unload a model, unless somebody uses it or has used it less than `unused_s` ago."""
        async with self._loading:
            if not model.users and time.monotonic() - model.last_used >= unused_s:
                await self._unload(model)

    async def _unload(self, model: ServedModel) -> None:
        """Under `_loading`: until the engine is closed its memory is not free for another."""
        engine, model.engine, model.leaving = model.engine, None, False
        if engine is not None:
            log.info(f"unloading {model.name}")
            await engine.close()

    async def unload_idle(self) -> None:
        """Runs for as long as the server does, whatever becomes of one engine."""
        while self._idle_s is not None:
            await asyncio.sleep(min(IDLE_CHECK, self._idle_s))
            for model in [m for m in self.models.values() if m.engine is not None]:
                [raised] = await asyncio.gather(self._unload_unused(model, self._idle_s), return_exceptions=True)
                if raised is not None:
                    log.error(f"{model.name} was not closed properly", exc_info=raised)

    def stop(self) -> None:
        """Ask the server to end; from any thread."""
        self.stopping = True

    def find_failure(self) -> BaseException | None:
        """Why an engine stopped by itself, if one did; `/health` fails from then on."""
        for model in self.models.values():
            if model.engine is not None and (failure := model.engine.failure) is not None:
                self.failure = self.failure or failure
        return self.failure

    async def restart_failed(self) -> None:
        """Unload engines that failed; the next request loads them again."""
        for model in self.models.values():
            if model.engine is not None and model.engine.failure is not None:
                log.error(f"{model.name} failed and is loaded again: {model.engine.failure}")
                async with self._loading:
                    await self._unload(model)
        self.failure = None

    async def close(self, finish: bool) -> None:
        """Close every engine; `finish`: once its running requests are done."""
        self.closing = True
        engines = [m.engine for m in self.models.values() if m.engine is not None]
        await asyncio.gather(*(engine.close(finish=finish) for engine in engines), return_exceptions=True)
