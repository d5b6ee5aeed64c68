"""A time limit for many short waits: as asyncio.timeout, with one timer for all of them."""

import asyncio

import pytest

from mlxrt.engine.async_timeout import RepeatedTimeout

FOREVER = 3600.0


def record_timers() -> list[asyncio.TimerHandle]:
    """The timers that the running loop makes from now on."""
    loop, made = asyncio.get_running_loop(), []
    call_at = loop.call_at
    loop.call_at = lambda when, *rest: made.append(call_at(when, *rest)) or made[-1]
    return made


def test_a_wait_that_takes_too_long_ends_and_the_next_has_its_own_time():
    async def main() -> None:
        timeout = RepeatedTimeout()
        for _ in range(2):
            with pytest.raises(TimeoutError), timeout.within(0.001):
                await asyncio.Event().wait()
            with timeout.within(FOREVER):
                await asyncio.sleep(0.01)  # longer than what is left of the limit before
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        timeout.close()

    asyncio.run(main())


def test_all_waits_share_one_timer():
    async def main() -> None:
        timeout, made = RepeatedTimeout(), record_timers()
        for _ in range(100):
            with timeout.within(FOREVER):
                await asyncio.sleep(0)
        assert len(made) == 1
        with pytest.raises(TimeoutError), timeout.within(0.001):  # does not wait for the longer one's timer
            await asyncio.Event().wait()
        assert len(made) == 2 and made[0].cancelled()
        timeout.close()

    asyncio.run(main())


def test_a_timer_that_fires_early_is_moved_on():
    async def main() -> None:
        timeout, waited = RepeatedTimeout(), asyncio.Event()
        with timeout.within(0.02):
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.04, waited.set)
        with timeout.within(FOREVER):  # the first wait's timer fires meanwhile
            await waited.wait()
        timeout.close()

    asyncio.run(main())


def test_whoever_cancels_the_task_is_heard():
    async def main() -> None:
        timeout = RepeatedTimeout()

        async def wait(seconds: float) -> None:
            with timeout.within(seconds):
                await asyncio.Event().wait()

        task = asyncio.create_task(wait(FOREVER))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        outer = asyncio.create_task(wait(0.001))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(0, outer.cancel)  # in the same turn as the timer, or before it
        with pytest.raises(asyncio.CancelledError):
            await outer
        timeout.close()

    asyncio.run(main())


def test_a_closed_timeout_leaves_no_timer():
    async def main() -> None:
        timeout, made = RepeatedTimeout(), record_timers()
        with timeout.within(FOREVER):
            await asyncio.sleep(0)
        timeout.close()
        assert [timer.cancelled() for timer in made] == [True]
        with timeout.within(FOREVER):  # and can be used again
            await asyncio.sleep(0)
        assert [timer.cancelled() for timer in made] == [True, False]
        timeout.close()

    asyncio.run(main())
