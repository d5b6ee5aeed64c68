"""States are values: what one holder does, no other sees. No device needed."""

import random
import subprocess
import sys

import pytest

from mlxrt.cache import BlockPool, BlockTable, PrefixCache, SequenceState
from mlxrt.cache.layer_state import RecurrentState
from mlxrt.errors import CacheCorrupt, CannotRewind, EvictedBlock, NoRoom


def ids(state):
    return [b.id for b in state.blocks]


def make_cache(pool, size=4, **options):
    return PrefixCache(lambda: (BlockTable(pool, size, **options),), size)


def state(table):
    return SequenceState(tuple(range(table.length)), (table,))


def test_live_sequences_and_the_store_share_blocks_without_copying():
    pool = BlockPool(32)
    cache = make_cache(pool)
    a = BlockTable(pool, 4).grow(10)
    cache.insert(state(a))
    b = cache.resume([*range(10), 99]).parts[0]
    assert ids(b) == ids(a) and not pool.copies
    a2, b2 = a.grow(1), b.grow(1)  # the first to write on keeps the last block, the second gets its own
    assert ids(a2) == ids(a) and ids(b2)[:2] == ids(a)[:2] and ids(b2)[2] != ids(a)[2]
    assert [(o.id, n.id) for o, n in pool.copies] == [(ids(a)[2], ids(b2)[2])]


def test_full_blocks_are_never_copied():
    pool = BlockPool(32)
    a = BlockTable(pool, 4).grow(8)
    a.grow(3), a.grow(5)
    assert not pool.copies


def test_blocks_go_back_with_their_last_holder():
    pool = BlockPool(8)
    cache = make_cache(pool)
    cache.insert(state(BlockTable(pool, 4).grow(10)))
    mine = cache.resume([*range(6), 99])
    cache.clear()
    assert len(mine) == 6 and pool.used == 2
    del mine
    assert pool.used == 0


def test_a_stale_handle_raises():
    pool = BlockPool(4)
    a = BlockTable(pool, 4).grow(4)
    block = a.blocks[0]
    pool.free(block)  # too early
    pool.allocate()
    with pytest.raises(EvictedBlock, match="generation"):
        block.check()


def test_a_failed_grow_changes_nothing():
    pool = BlockPool(3)
    a = BlockTable(pool, 4).grow(6)
    with pytest.raises(NoRoom):
        a.grow(3)
    assert pool.available == 0 and a.grow(2).length == 8


def test_a_pool_doubles_up_to_its_limit():
    pool = BlockPool(4, 10)
    held = pool.allocate(3)
    assert pool.size == 4
    held += pool.allocate(1)
    assert pool.size == 8 and len({b.id for b in held}) == 4 and 0 not in {b.id for b in held}
    held += pool.allocate(5)
    assert pool.size == 10
    with pytest.raises(NoRoom, match="1 blocks wanted, 0 of 9"):
        pool.allocate(1)


def test_window_lets_blocks_go_and_the_store_keeps_them():
    pool = BlockPool(64)
    cache = make_cache(pool, window=6)
    a = BlockTable(pool, 4, window=6)
    for n in (8, 8, 8):
        a = a.grow(n)
        cache.insert(state(a))
    assert a.first == 2 and a.floor == 13
    for n in range(1, 24):
        assert len(cache.resume([*range(n), 99])) == n
    with pytest.raises(CannotRewind):
        a.rewind(12)


def test_slack_keeps_blocks_that_are_not_flushed_yet():
    a = BlockTable(BlockPool(64), 4, window=3, slack=20).grow(8)
    for _ in range(30):
        a = a.grow(1)
        assert a.first * 4 <= max(0, a.length - 20)
    assert a.first > 0


@pytest.mark.parametrize("step", [1, 3, 5, 16, 40])
@pytest.mark.parametrize(
    "empty",
    [
        lambda pool: BlockTable(pool, 4),
        lambda pool: BlockTable(pool, 4, window=8, slack=36),
        lambda pool: BlockTable(pool, 32, window=5, slack=64),
        lambda pool: BlockTable(pool, 4, window=8, slack=8, keep=5),
        lambda pool: BlockTable(pool, 32, window=5, slack=64, keep=4),
        lambda pool: RecurrentState(pool, 8),
    ],
)
def test_num_blocks_bounds_what_a_growing_sequence_holds(empty, step):
    """Admission counts on it: a growth takes its blocks before the state it grew from gives any back."""
    chance = random.Random(step)
    for _ in range(8):
        pool, most = BlockPool(400), 0
        part, n = empty(pool), chance.randrange(1, 200)
        while part.length < n:
            before = part
            part = before.grow(min(chance.choice((step, chance.randint(1, step))), n - part.length), checkpoints=False)
            most = max(most, pool.used)
            part, before = part.after_step(), None
        assert most <= part.num_blocks(n, step)


def test_a_recurrent_state_keeps_no_blocks_of_its_last_step():
    pool = BlockPool(32)
    a = RecurrentState(pool, 8).grow(30)
    assert [n for n, _ in a.inner] == [8, 16, 24] and pool.used == 4
    a = a.after_step()
    assert pool.used == 1 and a.length == 30
    b = a.grow(20, checkpoints=False)
    assert pool.used == 2 and not b.inner and b.before == a.blocks


def test_parts_cannot_disagree():
    with pytest.raises(CacheCorrupt):
        SequenceState((1, 2, 3), (BlockTable(BlockPool(8), 4).grow(2),))


def test_nothing_before_zero():
    with pytest.raises(CannotRewind):
        BlockTable(BlockPool(8), 4).grow(2).rewind(-1)


def test_the_store_finds_the_longest_prefix_and_leaves_one_token():
    pool = BlockPool(64)
    cache = make_cache(pool)
    cache.insert(state(BlockTable(pool, 4).grow(10)))
    assert len(cache.resume(range(10))) == 9
    assert len(cache.resume([*range(7), 50, 51])) == 7
    assert cache.resume([50, 51]) is None
    assert cache.resume([0]) is None
    assert (cache.hits, cache.misses, cache.reused) == (2, 2, 16)


def test_a_longer_text_replaces_the_half_block_it_continues():
    pool = BlockPool(64)
    cache = make_cache(pool)
    a = BlockTable(pool, 4).grow(6)
    cache.insert(state(a))
    cache.insert(state(a.grow(5)))
    assert len(cache) == 3 and len(cache.resume([*range(11), 99])) == 11


def test_eviction_takes_leaves_first_and_the_least_recently_used():
    pool = BlockPool(64)
    cache = make_cache(pool)
    a = BlockTable(pool, 4).grow(12)
    cache.insert(state(a))
    other = SequenceState((0, 1, 2, 3, 70, 71, 72, 73), (BlockTable(pool, 4).grow(8),))
    cache.insert(other)
    del a, other
    assert len(cache.resume([*range(12), 99])) == 12  # used again: the other branch is older now
    assert cache.evict()
    assert len(cache.resume([0, 1, 2, 3, 70, 99])) == 4
    for _ in range(3):
        assert cache.evict()
    assert not cache.evict() and pool.used == 0


def test_a_cursor_to_an_evicted_node_starts_again():
    pool = BlockPool(64)
    cache = make_cache(pool)
    a = BlockTable(pool, 4).grow(8)
    node = cache.insert(state(a))
    cache.clear()
    a = a.grow(4)
    assert cache.insert(state(a), node).depth == 3 and len(cache.resume([*range(12), 9])) == 12


def test_an_evicted_node_lets_its_blocks_go_though_a_sequence_names_it():
    pool = BlockPool(64)
    cache = make_cache(pool)
    node = cache.insert(state(BlockTable(pool, 4).grow(8)))
    assert pool.used == 2 and node.alive
    while cache.evict():
        pass
    assert pool.used == 0 and not node.alive


def test_the_store_agrees_with_a_list_of_everything_it_was_given():
    """Random prompts over a small alphabet: the answer is the longest common prefix with anything inserted."""
    import random

    rng = random.Random(7)
    pool = BlockPool(4000)
    cache, prompts = make_cache(pool), []
    for _ in range(300):
        text = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 30)))
        want = max((common(text[:-1], t) for t in prompts), default=0)
        found = cache.resume(text)
        assert (len(found) if found else 0) == want
        if found:
            assert found.tokens == text[:want]
        cache.insert(SequenceState(text, (BlockTable(pool, 4).grow(len(text)),)))
        prompts.append(text)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_scheduler_imports_no_mlx():
    code = "import sys, types; m = types.ModuleType('mlxrt'); m.__path__ = ['mlxrt']; sys.modules['mlxrt'] = m\n"
    code += "sys.modules['mlx'] = None\n"
    code += "import mlxrt.engine.scheduler; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kept_blocks_stay_before_the_window():
    """Blocks of 4 tokens: 0 and 1 hold the first five, the window of 6 moves on without the ones between."""
    pool = BlockPool(64)
    cache, a = make_cache(pool, window=6, keep=5), BlockTable(pool, 4, window=6, keep=5)
    every = []
    for n in (8, 8, 8, 8):
        a = a.grow(n)
        every += ids(a)[len(every) - a.first :]
        cache.insert(state(a))
    assert a.first == 2 and ids(a) == [*every[:2], *every[4:]] and a.floor == 4 * 4 + 6 - 1
    assert [a.block_for(i, 4) and a.block_for(i, 4).id for i in range(9)] == [*every[:2], None, None, *every[4:], None]
    for n in range(a.floor, 33):
        assert ids(a.rewind(n)) == ids(a)[: -(-n // 4) - 2]
    with pytest.raises(CannotRewind):
        a.rewind(a.floor - 1)
    for n in range(1, 32):
        found = cache.resume([*range(n), 99]).parts[0]
        first = max(0, n - 6 + 1) // 4
        assert found.length == n and found.first == max(0, first - 2)
        assert ids(found) == [every[i] for i in range(-(-n // 4)) if i < 2 or i >= first]


def test_a_state_with_kept_blocks_is_restored_as_it_was():
    pool = BlockPool(64)
    a = BlockTable(pool, 4, window=6, keep=5)
    for n in (8, 8, 8, 7):
        a = a.grow(n)
    b = BlockTable(pool, 4, window=6, keep=5).restore(tuple(pool.allocate(len(a.blocks))), 31, a.describe())
    assert (b.first, b.floor, b.length) == (a.first, a.floor, a.length)
    assert [block.filled for block in b.blocks] == [block.filled for block in a.blocks] == [4] * 5 + [3]


def test_a_kept_block_that_was_evicted_ends_the_reuse():
    pool = BlockPool(64)
    cache, a = make_cache(pool, window=6, keep=4), BlockTable(pool, 4, window=6, keep=4)
    for _ in range(4):
        a = a.grow(8)
        cache.insert(state(a))
    root = cache.full_nodes(range(4))[0]
    root.blocks = [None]
    assert cache.resume([*range(31), 99]) is None
