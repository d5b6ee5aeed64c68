"""Models that come and go while others ask for them: one holds memory at a time, whatever closes slowly or fails."""

import asyncio
import logging
from typing import ClassVar

import pytest

from mlxrt import EngineConfig
from mlxrt.server.served_models import ServedModels


class FakeEngine:
    """Counts how many are open at once; closes when it is let, or fails to."""

    open: ClassVar[list["FakeEngine"]] = []

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.closing, self.gate, self.fails = asyncio.Event(), asyncio.Event(), False
        self.open.append(self)

    async def close(self, finish: bool = False) -> None:
        self.closing.set()
        await self.gate.wait()
        self.open.remove(self)
        if self.fails:
            raise OSError("no space left on the disk")


@pytest.fixture
def made(monkeypatch) -> list[tuple[FakeEngine, int]]:
    """The engines that were loaded, and how many others were open then."""
    found: list[tuple[FakeEngine, int]] = []
    monkeypatch.setattr(FakeEngine, "open", [])

    async def run_here(work, *given):
        return work(*given)

    monkeypatch.setattr("mlxrt.server.served_models.asyncio.to_thread", run_here)
    return found


def make_models(made, **options) -> ServedModels:
    def load(source: str, config: EngineConfig) -> FakeEngine:
        others = len(FakeEngine.open)
        made.append((FakeEngine(), others))
        return made[-1][0]

    return ServedModels({"one": "1", "two": "2"}, EngineConfig(), load, **options)


async def use(models: ServedModels, name: str) -> None:
    async with models.use(name):
        pass


async def let_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("wanted", ["one", "two"])
@pytest.mark.parametrize("reason", ["released", "idle", "failed"])
def test_no_model_is_loaded_while_another_is_closing(made, reason, wanted, monkeypatch):
    monkeypatch.setattr("mlxrt.server.served_models.IDLE_CHECK", 0)

    async def main() -> None:
        models = make_models(made, max_models=2, idle_s=1e-9)
        model = await models.start()
        first = made[0][0]
        if reason == "released":
            unloading = asyncio.create_task(models.release(model))
        elif reason == "idle":
            unloading = asyncio.create_task(models.unload_idle())
        else:
            first.failure = RuntimeError("boom")
            unloading = asyncio.create_task(models.restart_failed())
        await first.closing.wait()
        using = asyncio.create_task(use(models, wanted))
        await let_run()
        first.gate.set()
        await using
        assert [others for _, others in made] == [0, 0]
        made[1][0].gate.set()
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_model_is_not_unloaded_from_under_who_came_meanwhile(made):
    async def main() -> None:
        models = make_models(made, max_models=2)
        one, _ = await models.start(), await use(models, "two")
        closing = asyncio.create_task(models.release(models.models["two"]))
        await made[1][0].closing.wait()
        releasing = asyncio.create_task(models.release(one))  # waits for its turn
        await let_run()
        async with models.use("one") as (_, engine):
            made[1][0].gate.set()
            await closing
            await releasing
            assert engine is made[0][0] and not engine.closing.is_set()
            engine.gate.set()
        assert engine.closing.is_set() and one.engine is None  # as was asked, once nobody uses it

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_engine_that_fails_to_close_does_not_end_the_unloading(made, caplog, monkeypatch):
    caplog.set_level(logging.ERROR, "mlxrt.server")
    logging.getLogger("mlxrt").propagate = True
    monkeypatch.setattr("mlxrt.server.served_models.IDLE_CHECK", 0)

    async def main() -> None:
        models = make_models(made, max_models=2, idle_s=1e-9)
        await models.start()
        made[0][0].fails = True
        made[0][0].gate.set()
        unloading = asyncio.create_task(models.unload_idle())
        await made[0][0].closing.wait()
        await use(models, "two")
        made[1][0].gate.set()
        await made[1][0].closing.wait()
        assert not unloading.done()
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert any("one was not closed" in r.getMessage() and r.exc_info for r in caplog.records)


def test_a_model_that_nobody_used_yet_is_idle_since_it_was_loaded(made):
    async def main() -> None:
        models = make_models(made)
        began = asyncio.get_running_loop().time()  # the same clock: time.monotonic
        model = await models.start()
        assert model.last_used >= began > 0

    asyncio.run(main())
