"""After every test of the engine: whatever its requests held has been given back."""

import gc
import weakref

import pytest

from mlxrt.engine.core import EngineCore

CORES: "weakref.WeakSet[EngineCore]" = weakref.WeakSet()


@pytest.fixture(scope="session", autouse=True)
def follow_engines():
    """Remember every engine, those of fixtures that outlive a test too."""
    init = EngineCore.__init__

    def followed(self, *args, **options):
        init(self, *args, **options)
        CORES.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "__init__", followed)
        yield


@pytest.fixture(autouse=True)
def check_leaks(follow_engines):
    """Blocks, states and slots that neither a running request nor the prefix cache names: none."""
    yield
    if any(leaks(core) for core in list(CORES)):
        gc.collect()  # a failed request's traceback, say, holds its states until then
        found = {id(core): leaks(core) for core in list(CORES)}
        assert not any(found.values()), f"blocks that nobody names, by group: {[f for f in found.values() if f]}"


def leaks(core: EngineCore) -> dict[int, int]:
    """Group -> blocks that are allocated and named by nobody."""
    with core.exclusive():
        found = {}
        for g, group in enumerate(core.pools.groups):
            running = {b.id for seq in core.scheduler.running if seq.parts for b in seq.parts[g].blocks}
            cached = core.prefix_cache.block_ids(g) if core.prefix_cache is not None else set()
            promised = {b.id for pair in group.pool.copies for b in pair}
            if n := group.pool.used - len(running | cached | promised):
                found[g] = n
        return found
