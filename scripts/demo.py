"""Shows a broker at work in about a minute. It uses a free port and a temporary directory.

scripts/demo              the whole tour
scripts/demo --no-spark   without its last two parts, in a few seconds
scripts/demo --keep       leaves the broker running, with the data of the tour
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.client import Client, Delivery, Envelope, NewMessage, RetryPolicy, Worker
from penstock.model.errors import PenstockError, VersionMismatch

PENSTOCK = [sys.executable, "-m", "penstock"]
QUIET = ["--log-level", "warning"]
START_TIMEOUT_S = 20
WORK_TIMEOUT_S = 10
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TIMELINE = "penstock-demo-timeline.png"
"""Kept after the tour, so that people can look at it."""
BATCH = 1000
BATCHES = 20
EVENTS = 20_000
EVENT = b"x" * 1000

IS_TERMINAL = sys.stdout.isatty()


def style(code: str, text: str) -> str:
    return f"\033[{code}m{text}\033[0m" if IS_TERMINAL else text


def title(number: int, text: str, why: str) -> None:
    print(f"\n{style('1;36', f'{number}. {text}')}\n   {style('2', why)}", flush=True)


def say(text: str) -> None:
    print(f"   {text}", flush=True)


def good(text: str) -> None:
    print(f"   {style('32', '✓')} {text}", flush=True)


class Broker:
    """A broker in its own process, started with the ordinary command."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.url = "http://127.0.0.1:0"
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> list[str]:
        """Starts the broker and returns the lines that it prints once it is ready."""
        port = self.url.rsplit(":", 1)[1]
        self._process = subprocess.Popen(
            [*PENSTOCK, "serve", "--port", port, "--data-dir", str(self.data_dir), *QUIET],
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
            # Ctrl-C is for the tour, which then stops the broker itself.
            start_new_session=True,
        )
        lines = self._greeting(self._process)
        found = re.search(r"http://[\w.]+:\d+", lines[0])
        if found is None:
            raise SystemExit(f"the broker printed something unexpected: {lines[0]}")
        self.url = found[0]
        return lines

    def kill(self) -> None:
        self._running().send_signal(signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._end()

    def let_go(self) -> None:
        """Leaves the broker running after the tour."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
            self._process.returncode = 0

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise SystemExit("the broker is not running")
        return self._process

    def _end(self) -> None:
        process, self._process = self._running(), None
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()

    @staticmethod
    def _greeting(process: subprocess.Popen[str]) -> list[str]:
        """Reads up to the last line of the greeting; errors of the start are on stderr."""
        stdout = process.stdout
        if stdout is None:
            raise SystemExit("the broker has no output")
        timer = threading.Timer(START_TIMEOUT_S, process.kill)
        timer.start()
        lines: list[str] = []
        for line in stdout:
            lines.append(line.rstrip())
            if line.startswith("  read on"):
                break
        timer.cancel()
        if not lines:
            raise SystemExit(f"the broker did not start (exit code {process.wait()})")
        return lines


def environment() -> dict[str, str]:
    """Removes the caller's own settings, which would change the tour."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
    return kept | {"PYTHONUNBUFFERED": "1"}


def command(broker: Broker, *words: str) -> None:
    """Runs a command and shows it as a user would type it."""
    say(style("1", f"$ penstock {shlex.join(words)}"))
    done = subprocess.run(
        [*PENSTOCK, *words],
        env=environment() | {"PENSTOCK_URL": broker.url},
        capture_output=True,
        text=True,
        check=False,
    )
    for line in (done.stdout + done.stderr).splitlines():
        say(f"  {line}")
    if done.returncode:
        raise SystemExit(f"the command ended with {done.returncode}")


@contextlib.contextmanager
def workers(
    broker: Broker, topic: str, group: str, handlers: dict[str, Callable[[Delivery], object]]
) -> Iterator[None]:
    """Runs a worker for each handler while the block runs; the keys are the owners' names."""
    with contextlib.ExitStack() as stack:
        running = []
        for owner, handler in handlers.items():
            client = stack.enter_context(Client(broker.url))
            worker = Worker(client, topic, group, handler, owner=owner)
            thread = threading.Thread(target=worker.run)
            thread.start()
            running.append((worker, thread))
        try:
            yield
        finally:
            for worker, _ in running:
                worker.stop()
            for _, thread in running:
                thread.join()


def wait_for(done: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WORK_TIMEOUT_S
    while not done():
        if time.monotonic() > until:
            raise SystemExit(f"{what}: not within {WORK_TIMEOUT_S} s")
        time.sleep(0.01)


# -- the tour ------------------------------------------------------------------------------------


def show_start(broker: Broker) -> None:
    title(1, "Start a broker", "One process, one directory, no other service.")
    say(style("1", "$ penstock serve"))
    for line in broker.start():
        say(f"  {line}")


def show_produce(broker: Broker) -> None:
    title(2, "Produce a message", "Its envelope names the run and step of a workflow.")
    command(broker, "topic", "create", "tasks", "--partitions", "3")
    words = ["--key", "user-1", "--run-id", "run-0", "--step-id", "summarize"]
    command(broker, "produce", "tasks", "summarize the report", *words)
    command(broker, "consume", "tasks", "--group", "agents", "--ack", "--max", "1")


def show_sharing(broker: Broker, client: Client) -> None:
    title(3, "Two workers share a group's work", "Each message goes to one of them, which acks it.")
    count = 30
    client.produce_batch([NewMessage("tasks", f"task {n}", key=f"user-{n}") for n in range(count)])
    done: Counter[str] = Counter()

    def handle(delivery: Delivery) -> None:
        time.sleep(0.005)
        done[delivery.owner] += 1

    with workers(broker, "tasks", "agents", {"worker-a": handle, "worker-b": handle}):
        wait_for(lambda: done.total() >= count, "the workers")
    shares = " and ".join(f"{owner} did {number}" for owner, number in sorted(done.items()))
    good(f"{shares}; together {done.total()} of {count}")


def show_retry(broker: Broker, client: Client) -> None:
    title(4, "Failures are retried", "If a handler raises, the worker nacks with the error.")
    client.create_topic("calls")
    policy = RetryPolicy(max_attempts=5, backoff_ms=100)
    client.produce("calls", "call upstream", envelope=Envelope(retry_policy=policy))
    seen: list[str] = []

    def handle(delivery: Delivery) -> None:
        because = f" (before: {delivery.last_error})" if delivery.last_error else ""
        outcome = "fails" if delivery.attempts < 3 else "works"
        seen.append(f"attempt {delivery.attempts} {outcome}{because}")
        if delivery.attempts < 3:
            raise TimeoutError("upstream is slow")

    with workers(broker, "calls", "agents", {"worker-a": handle}):
        wait_for(lambda: len(seen) >= 3, "the retry")
    for line in seen:
        say(line)
    good("acked after the third attempt; the wait doubles after each failure")


def show_dead_letter(broker: Broker, client: Client) -> None:
    title(5, "Dead letters", "After max_attempts failures a message moves to dlq.<topic>.")
    policy = RetryPolicy(max_attempts=2, backoff_ms=50)
    client.produce("calls", "call nobody", envelope=Envelope(retry_policy=policy))

    def handle(delivery: Delivery) -> None:
        raise LookupError("no such number")

    with workers(broker, "calls", "agents", {"worker-a": handle}):
        wait_for(lambda: "dlq.calls" in client.list_topics(), "the dead letter")
    for delivery in client.consume("dlq.calls", "people", wait_s=1):
        died = delivery.envelope.dlq
        client.ack(delivery)
        if died is not None:
            good(f"{delivery.value!r} is in dlq.calls, after {died.attempts} attempts:")
            say(f"  {died.last_error} (group {died.group}, offset {died.original_offset})")
        break


def show_idempotency(client: Client) -> None:
    title(6, "The same message twice", "A producer can safely send again with the same key.")
    client.create_topic("payments")
    payment = NewMessage("payments", "17 EUR", envelope=Envelope(idempotency_key="payment-1"))
    for attempt in ("first", "second"):
        outcome = client.produce_batch([payment])[0]
        if isinstance(outcome, Exception):
            raise outcome
        say(f"{attempt} time: {'known, not stored again' if outcome.duplicate else 'stored'}")
    stored = client.describe_topic("payments").next_offset
    good(f"the topic has {stored} message")


def show_crash(broker: Broker, client: Client) -> None:
    title(7, "Kill the broker", "Half of 1,000 messages are acked; then the broker gets a SIGKILL.")
    client.create_topic("ledger")
    client.produce_batch([NewMessage("ledger", f"entry {n}") for n in range(BATCH)])
    half = BATCH // 2
    with client.consume("ledger", "audit", wait_s=2) as stream:
        acked = []
        for delivery in stream:
            client.ack(delivery)
            acked.append(delivery.offset)
            if len(acked) == half:
                break
    broker.kill()
    say(f"killed, with {half} acked and {BATCH - half} not")
    started = time.monotonic()
    broker.start()
    say(f"started again in {time.monotonic() - started:.1f} s")
    topic = client.describe_topic("ledger")
    lag = topic.groups[0].partitions[0].lag
    if (topic.next_offset, lag) != (BATCH, BATCH - half):
        raise SystemExit(f"something was lost: {topic}")
    with client.consume("ledger", "audit", wait_s=2) as stream:
        first = next(stream)
    if first.offset in acked:
        raise SystemExit(f"offset {first.offset} was acked and delivered again")
    good(f"all {topic.next_offset} messages are there, and all {half} acks")


def show_rate(client: Client) -> None:
    title(8, "In batches", f"{BATCHES} requests of {BATCH:,} messages, each synced to disk.")
    client.create_topic("events")
    batch = [NewMessage("events", f"event {n}", key=f"k{n % 64}") for n in range(BATCH)]
    started = time.monotonic()
    for _ in range(BATCHES):
        client.produce_batch(batch)
    seconds = time.monotonic() - started
    count = BATCH * BATCHES
    good(f"{count:,} messages in {seconds:.2f} s: {count / seconds:,.0f} a second")
    say(style("2", "with one Python client, one request after another; see scripts/bench for more"))


@contextlib.contextmanager
def stalled_subscriber(broker: Broker, stream: str) -> Iterator[None]:
    """Opens a subscription that never reads a byte."""
    host, port = broker.url.removeprefix("http://").split(":")
    path = f"/v1/tenants/default/namespaces/default/streams/{stream}/subscribe"
    with socket.socket() as connection:
        # A small window, so that the kernel buffers little.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        yield


def show_stream(broker: Broker, client: Client) -> None:
    title(
        9,
        "A stream, with a fast and a stalled subscriber",
        "Every subscriber gets every event once; one that does not read loses only its own.",
    )
    # No lag alert: the tour itself says that one subscriber lags.
    client.create_stream("default", "default", "ticks", lag_alert_events=0)
    ticks = client.stream("ticks")
    received = 0
    with stalled_subscriber(broker, "ticks"), ticks.subscribe() as events:
        wait_for(lambda: len(ticks.subscriptions()) == 2, "the subscribers")
        started = time.monotonic()
        while received < EVENTS:
            ticks.publish_batch([EVENT] * (BATCH // 2))
            for _ in range(BATCH // 2):
                received += next(events) == EVENT
        seconds = time.monotonic() - started
        lags = {lag.subscription_id: lag for lag in ticks.subscriptions()}
    fast = lags.pop(events.subscription_id)
    (stalled,) = lags.values()
    say(f"{EVENTS:,} events of 1 kB published, in {seconds:.1f} s")
    say(f"fast:    received {received:,}, dropped {fast.dropped:,}")
    say(
        f"stalled: {stalled.delivered:,} handed to its connection, {stalled.messages_behind:,} in "
        f"its buffer, {stalled.dropped:,} dropped"
    )
    known = stalled.delivered + stalled.messages_behind + stalled.dropped
    if fast.dropped or not stalled.dropped or known != EVENTS:
        raise SystemExit(f"unexpected counts: {fast}, {stalled}")
    good("the stalled subscriber did not affect the fast one")


def show_cache(broker: Broker, client: Client) -> None:
    title(10, "A cache", "Values by key, with a time to live, counters, versions and watches.")
    cache = client.cache("default")
    cache.put("session:ann", "3 apples", ttl_ms=300)
    before = cache.get("session:ann")
    time.sleep(0.3)
    after = cache.get("session:ann")
    if before is None or after is not None:
        raise SystemExit(f"a TTL of 300 ms: {before}, and {after} after it")
    say(f"put with a TTL of 300 ms: {before.value!r} at first, {after} after 300 ms")

    def count() -> None:
        with Client(broker.url) as mine:
            for _ in range(50):
                mine.cache("default").incr("visits")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    visits = cache.get("visits")
    say(f"4 clients add 1 to a counter, 50 times each: {visits and visits.value.decode()}")
    if visits is None or visits.value != b"200":
        raise SystemExit("the counter lost increments")

    with cache.watch(key="limits") as changes:
        read = cache.put("limits", "10/s")
        cache.put("limits", "20/s", if_version=read)
        try:
            cache.put("limits", "99/s", if_version=read)
        except VersionMismatch as conflict:
            say(f"two clients change one version; the second is refused: {conflict.http_status}")
        for _ in range(2):
            change = next(changes)
            say(f"a watch saw: {change.event} {change.key} {(change.value or b'').decode()}")
    good("no increment was lost, and no change was overwritten unseen")


def show_spark(broker: Broker) -> None:
    title(
        11,
        "Everything is data",
        "Spark reads the messages, and the journal of what happened to them.",
    )
    from penstock.spark import session  # imported here: --no-spark does not need it

    say("starting Spark on this machine (use --no-spark to skip this) …")
    spark = session("penstock-demo")
    try:
        reader = spark.read.format("penstock").option("url", broker.url)
        records = reader.option("topic", "*").option("columns", "topic,offset").load()
        counts = {row["topic"]: row["count"] for row in records.groupBy("topic").count().collect()}
        for topic, count in sorted(counts.items()):
            say(f"{topic:<12} {count:>7,} messages")
        journal = spark.read.format("penstock").option("url", broker.url).option("log", "journal")
        kinds = journal.load().groupBy("kind").count().collect()
        told = ", ".join(f"{row['count']:,} {row['kind']}" for row in sorted(kinds))
        say(f"journal: {told}")
        good(f"{sum(counts.values()):,} messages read as rows")
    finally:
        spark.stop()


def show_pipelines(broker: Broker) -> None:
    title(
        12,
        "Where did the time go, and what went wrong?",
        "Agents work on runs of several steps; some fail. Pipelines analyse the journal.",
    )
    played = subprocess.run(
        [sys.executable, str(EXAMPLES / "agent_runs.py")],
        env=environment() | {"PENSTOCK_URL": broker.url},
        capture_output=True,
        text=True,
        check=True,
    )
    for line in played.stdout.splitlines():
        say(line)
    lake = ["--once", "--lake", str(broker.data_dir.parent / "lake")]
    command(broker, "pipeline", "run", "archive", "lineage", "deadletters", *lake)
    plot = ["--set", "run=run-2", "--set", f"plot={Path(tempfile.gettempdir(), TIMELINE)}"]
    command(broker, "pipeline", "run", "lineage", *lake, *plot)
    good("the lake has every message and journal row once; run it again to add new ones")


def show_the_way_on(broker: Broker, keep: bool) -> None:
    where = Path(sys.executable).with_name("penstock")
    penstock = os.path.relpath(where) if where.exists() else "penstock"
    ways = {
        f"{penstock} serve": "start your own broker, in ./penstock-data",
        "scripts/demo --keep": "run the tour again and keep its broker running",
    }
    print(f"\n{style('1;36', 'Next steps')}")
    if keep:
        say(f"the broker keeps running at {style('1', broker.url)}; `kill {broker.pid}` stops it")
        say(f"its data is in {broker.data_dir}")
        say(style("1", f"$ export PENSTOCK_URL={broker.url}"))
        ways = {f"{penstock} topic describe ledger": "show what the tour left there"}
    ways |= {
        f"{penstock} --help": "list the commands",
        f"{broker.url if keep else 'http://127.0.0.1:8080'}/docs": "the API of a running broker",
        "examples/": "a worker, routers, a stream, a rate limit, agents",
    }
    width = max(map(len, ways))
    for way, text in ways.items():
        say(f"{way:<{width}}   {text}")


def tour(broker: Broker, *, spark: bool, keep: bool) -> None:
    show_start(broker)
    with Client(broker.url) as client:
        show_produce(broker)
        show_sharing(broker, client)
        show_retry(broker, client)
        show_dead_letter(broker, client)
        show_idempotency(client)
        show_crash(broker, client)
        show_rate(client)
        show_stream(broker, client)
        show_cache(broker, client)
    if spark:
        show_spark(broker)
        show_pipelines(broker)
    show_the_way_on(broker, keep)


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a broker at work.")
    parser.add_argument("--keep", action="store_true", help="leave the broker running")
    parser.add_argument("--no-spark", action="store_true", help="leave out the parts with Spark")
    arguments = parser.parse_args()
    # The tour reports failures itself.
    logging.getLogger("penstock.worker").setLevel(logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    broker = Broker(directory / "data")
    kept = False
    try:
        tour(broker, spark=not arguments.no_spark, keep=arguments.keep)
        kept = arguments.keep
    except KeyboardInterrupt:
        sys.exit(130)
    except PenstockError as error:
        sys.exit(f"the tour failed: {error.code}: {error.message}")
    finally:
        if kept:
            broker.let_go()
        else:
            broker.stop()
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
