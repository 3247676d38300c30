"""The scheduler of an event loop, and what it does with work that comes after its end."""

from __future__ import annotations

import asyncio
import threading

from penstock.engine.scheduler import LoopScheduler


def test_work_for_threads_is_done_until_the_scheduler_is_closed() -> None:
    """The log's last commit calls back after the close; it must not meet an error there."""

    async def run() -> None:
        scheduler = LoopScheduler(asyncio.get_running_loop())
        done = threading.Semaphore(0)
        late: list[str] = []
        scheduler.in_thread(lambda: done.release())
        scheduler.in_background(lambda: done.release())
        assert done.acquire(timeout=60)
        assert done.acquire(timeout=60)
        scheduler.close()
        scheduler.in_thread(lambda: late.append("thread"))
        scheduler.in_background(lambda: late.append("background"))
        assert late == []

    asyncio.run(run())
