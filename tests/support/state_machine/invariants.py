"""What must hold between any two operations, and what must be left when all is over. Host side only, so it is cheap."""

from mlxrt import Engine
from mlxrt.cache import BlockPool, LayerState


def require(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def check(engine: Engine) -> None:
    for seq in engine.core.scheduler.running:
        require(seq.finish is None, f"request {seq.id} runs and has ended ({seq.finish})")
        for g, part in enumerate(seq.parts):
            require(part.length == seq.length, f"request {seq.id}: group {g} has {part.length} of {seq.length} tokens")
            check_part(part)
        require(seq.length <= len(seq), f"request {seq.id}: {seq.length} tokens in memory, {len(seq)} exist")
    require(all(not s.parts for s in engine.core.scheduler.waiting), "a waiting request holds memory")
    for group in engine.core.pools.groups:
        check_pool(group.pool)
    check_store(engine)
    check_stats(engine)


def check_part(part: LayerState) -> None:
    for block in part.blocks:
        block.check()
        require(block.id != 0, "somebody holds place 0, which is nowhere")
    require(len({b.id for b in part.blocks}) == len(part.blocks), "a state names a place twice")
    require(part.floor <= part.length, f"floor {part.floor} above length {part.length}")


def check_pool(pool: BlockPool) -> None:
    free = pool._free
    require(len(set(free)) == len(free), "a block is free twice")
    require(0 not in free and all(0 < i < pool.size for i in free), "a free block does not exist")
    require(pool.size == len(pool.generations) and pool.size <= pool.limit, "a pool outgrew its limit")


def check_store(engine: Engine) -> None:
    store = engine.core.prefix_cache
    if store is None:
        return
    for node in store._nodes:
        require(node.alive and node.parent is not None, "the store lists a node that it removed")
        require(node.parent in store._roots.values() or node.parent in store._nodes, "a node outlived its parent")
        require(len(node.tokens) <= store.node_size, f"a node has {len(node.tokens)} tokens, {store.node_size} at most")
        for held in node.blocks:
            for block in [] if held is None else held.blocks if isinstance(held, LayerState) else [held]:
                block.check()
    oldest = next(iter(store._nodes), None)
    require(oldest is None or not oldest.children_by_token, "the node to be evicted next has children")


def check_stats(engine: Engine) -> None:
    stats = engine.stats()
    require(0 <= stats.kv_bytes <= stats.kv_allocated <= stats.kv_limit, f"bytes contradict each other: {stats}")
    require(stats.running == len(engine.core.scheduler.running) <= engine.config.max_running, f"too many run: {stats}")
    require(stats.waiting == len(engine.core.scheduler.waiting), f"waiting: {stats}")
    require(stats.reused_tokens >= stats.hits, f"a hit reuses one token at least: {stats}")


def check_empty(engine: Engine) -> None:
    """Everything was finished, dropped and cleared."""
    require(not engine.core.outputs.states, f"request states left: {list(engine.core.outputs.states)}")
    require(not engine.core._inflight, "steps left in flight")
    stats = engine.stats()
    require(stats.running == stats.waiting == stats.stored_nodes == 0, f"something is left: {stats}")
    for g, group in enumerate(engine.core.pools.groups):
        pool = group.pool
        require(pool.used == 0, f"group {g}: {pool.used} blocks leaked")
        require(sorted(pool._free) == list(range(1, pool.size)), f"group {g}: blocks lost")
    require(stats.kv_bytes == 0, f"bytes left: {stats}")
