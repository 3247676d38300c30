"""Plays agent runs for the pipelines to analyse: plans, searches, drafts; some steps fail.

Run a broker, this, and a pipeline:

    penstock serve
    python agent_runs.py
    penstock pipeline run lineage --once

It prints

    run-1: published
    run-2: published, the search was tried 2 times
    run-3: published
    run-4: given up: no source for claim 4711
    run-5: published
    run-6: given up: no source for claim 815

A step is a message that names its run and its parent step. If a worker raises, the step is nacked
and tried again, and dead-lettered after the third attempt. The pipelines need nothing else: they
read what happened from the broker's journal.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock.client import Client, Delivery, Envelope, RetryPolicy, Worker

RUNS = 6
NEXT = {"plan": ["outline", "search"], "search": ["draft"], "draft": ["publish"]}
TOPICS = {"plan": "agents", "outline": "agents", "draft": "agents", "search": "tools"}
SECONDS = {"plan": 0.03, "outline": 0.02, "search": 0.04, "draft": 0.08, "publish": 0.01}
UNKNOWN_CLAIMS = {"run-4": 4711, "run-6": 815}
POLICY = RetryPolicy(max_attempts=3, backoff_ms=60)


class Newsroom:
    """Handles the steps, and remembers how each run ended."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._notes: dict[str, str] = {}
        # Released twice per run: for its outline, and for the end of its search branch.
        self._ends = threading.Semaphore(0)
        self.endings: dict[str, str] = {}

    def begin(self, run: str) -> None:
        self._produce(run, "plan", parent="")

    def work(self, delivery: Delivery) -> None:
        """Handles one step. An error raised here becomes the reason of the failed attempt."""
        run, step = delivery.envelope.run_id, delivery.envelope.step_id
        time.sleep(SECONDS[step])
        if step == "search":
            self._search(run, delivery.attempts)
        for following in NEXT.get(step, []):
            self._produce(run, following, parent=step)
        if step == "publish":
            note = self._notes.get(run)
            self.endings[run] = f"published, {note}" if note else "published"
        if step in ("publish", "outline"):
            self._ends.release()

    def wait(self, seconds: float) -> bool:
        """Waits until all runs have ended; returns whether they did within `seconds`."""
        until = time.monotonic() + seconds
        return all(
            self._ends.acquire(timeout=max(0.0, until - time.monotonic())) for _ in range(2 * RUNS)
        )

    def _search(self, run: str, attempt: int) -> None:
        if run == "run-2" and attempt == 1:
            raise TimeoutError("no answer from the index after 40 ms")
        if run == "run-2":
            self._notes[run] = f"the search was tried {attempt} times"
        if run in UNKNOWN_CLAIMS:
            reason = f"no source for claim {UNKNOWN_CLAIMS[run]}"
            if attempt == POLICY.max_attempts:
                self.endings[run] = f"given up: {reason}"
                self._ends.release()
            raise LookupError(reason)

    def _produce(self, run: str, step: str, parent: str) -> None:
        envelope = Envelope(
            run_id=run,
            step_id=step,
            parent_step_id=parent,
            tenant_id="north" if run < "run-4" else "south",
            retry_policy=POLICY,
        )
        topic = TOPICS.get(step, "tools")
        self._client.produce(topic, f"{step} for {run}", key=run, envelope=envelope)


@contextmanager
def working(url: str, token: str, newsroom: Newsroom) -> Iterator[None]:
    """Runs two workers for each topic while the block runs."""
    with ExitStack() as stack:
        workers = []
        for topic in ("agents", "tools"):
            for number in (1, 2):
                client = stack.enter_context(Client(url, token=token))
                owner = f"{topic}-{number}"
                workers.append(Worker(client, topic, "newsroom", newsroom.work, owner=owner))
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for worker in workers:
                worker.stop()
            for thread in threads:
                thread.join()


def main() -> None:
    # Failures are intended here, and reported at the end.
    logging.getLogger("penstock.worker").setLevel(logging.CRITICAL)
    url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8080")
    token = os.environ.get("PENSTOCK_TOKEN", "")
    with Client(url, token=token) as client:
        client.create_topic("agents", 2)
        client.create_topic("tools", 2)
        newsroom = Newsroom(client)
        with working(url, token, newsroom):
            for number in range(1, RUNS + 1):
                newsroom.begin(f"run-{number}")
            if not newsroom.wait(30):
                raise SystemExit("some runs did not end within 30 s")
    for run, ending in sorted(newsroom.endings.items()):
        print(f"{run}: {ending}")


if __name__ == "__main__":
    main()
