"""Rounds of work and faults on one data directory, and a look at everything after each.

A round: clients do all kinds of things at random while faults come; the broker is killed, stopped,
or left alone; `wal verify` judges the directory of a broker that has ended; a broker is started;
and everything in it is compared with the model. The first violation ends the soak.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.storage import offline
from penstock.storage.vfs import Vfs
from tests.broker_process import eventually
from tests.soak.faults import FAILING_WRITE, KILL, REST, STOP, Faults
from tests.soak.journal_checks import JournalChecks
from tests.soak.namespace_load import NamespaceChecks, NamespaceLoad, NamespaceModel
from tests.soak.process import SoakBroker
from tests.soak.queue_admin import Churn, Effects, Publisher
from tests.soak.queue_checks import QueueChecks
from tests.soak.queue_load import Consumer, Features, Producer, Setting, until_lost
from tests.soak.queue_model import QueueModel, Topic
from tests.soak.stream_load import StreamChecks, StreamLoad, StreamModel

WORKERS, REPORTS = "workers", "reports"
TOPICS = 3
MOST_SENT = 1500
"""A topic with so many messages is deleted and another made: a look reads all of it, many times."""
ROUND_S = (1.0, 4.0)
LONG_LOOK_EVERY = 3
"""Rounds between two looks of a new group, which acks everything, and at the newest of the journal,
for which the broker seals."""
PATIENCE_S = 120.0
MOST_RSS_BYTES = 400 * 1024 * 1024
MOST_FILES = 400


LOG_FAILED = "the log cannot be written any more"
NOT_ERASED = "refused requests may take effect"


def tracebacks(log: str) -> list[str]:
    """The errors that tracebacks in the log end with."""
    found: list[str] = []
    is_within = False
    for line in log.splitlines():
        if line.startswith("Traceback"):
            is_within = True
        elif is_within and not line.startswith(" "):
            found.append(line)
            is_within = False
    return found


class SoakFailed(AssertionError):
    """A promise is broken, or the broker does not do what a broker must."""


class Soak:
    def __init__(self, directory: Path, seed: int, say: Callable[[str], object] = print) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.seed = seed
        self.rng = random.Random(seed)
        self.broker = SoakBroker(directory)
        self.model = QueueModel()
        self.namespace = NamespaceModel(self.model)
        self.stream = StreamModel(self.model)
        self.faults = Faults(self.broker, self.rng)
        self.counts: Counter[str] = Counter()
        self._say = say
        self._queue_checks = QueueChecks(self.broker, self.model)
        self._journal_checks = JournalChecks(self.broker, self.model)
        self._namespace_checks = NamespaceChecks(self.broker, self.namespace)
        self._stream_checks = StreamChecks(self.broker, self.stream)
        self._made = 0
        self._lives = 0
        self._is_new_life = True
        self._began = time.monotonic()

    def run(self, seconds: float, line_every_s: float = 30.0) -> None:
        """Raises SoakFailed; the directory then has all that is known."""
        self._begin()
        next_line = self._began + line_every_s
        try:
            while time.monotonic() - self._began < seconds:
                self._round()
                if time.monotonic() >= next_line:
                    self._say(self.figures())
                    next_line = time.monotonic() + line_every_s
            self._end_life(STOP)
            self._judge("the last stop")
        finally:
            self.faults.mend()
            self._keep_log()
            self.broker.close()

    def figures(self) -> str:
        """One line."""
        every = self.counts + self.model.counts + self.faults.counts
        every |= Counter({name: n for name, n in self.broker.control.counts().items() if n})
        told = ", ".join(f"{name} {count:,}" for name, count in sorted(every.items()))
        return f"{time.monotonic() - self._began:6.0f} s  round {self.model.round}: {told}"

    # -- a round --------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._note({"seed": self.seed})
        self._start()
        self._features = self._find_features()
        self._namespace_checks.set_up()
        self._stream_checks.set_up()
        for _ in range(TOPICS):
            self._make_topic()

    def _find_features(self) -> Features:
        paths = self.broker.client.get("/docs/openapi.json").json()["paths"]
        nack = json.dumps(paths["/v1/nack"]["post"])
        return Features(
            can_release="/v1/release" in paths,
            can_delay_nacks='"delay_ms"' in nack,
            can_nack_as_dead='"dead"' in nack,
            topics_limit_attempts='"max_attempts"' in json.dumps(paths["/v1/topics"]["post"]),
        )

    def _round(self) -> None:
        self.model.round += 1
        end = self.faults.choose_end()
        seconds = self.rng.uniform(*ROUND_S)
        end = asyncio.run(self._work(end, seconds))
        self._note({"round": self.model.round, "end": end, "faults": self.faults.story})
        self._judge("the work")
        self.counts[f"rounds that end in {end}"] += 1
        if end != REST:
            self._verify_directory()
            self._start()
        self._is_new_life = end != REST
        self._look(has_restarted=end != REST)
        self._judge("the look")
        self._retire_topics()

    async def _work(self, end: str, seconds: float) -> str:
        """How the round ended: a broker whose log has failed is killed in any case."""
        setting = Setting(self.model, self.broker.port, self.rng, self._features)
        setting.is_order_certain = self._is_new_life
        setting.numbers = iter(range(self._lives * 10**6 + self.model.round * 10**4, 10**12))
        self._limit_topics(True)
        works = self._works(setting)
        async with asyncio.timeout(PATIENCE_S):
            tasks = [asyncio.create_task(until_lost(work)) for work in works]
            disturbing = asyncio.create_task(self.faults.disturb(seconds))
            await asyncio.sleep(seconds / 2)
            if end == FAILING_WRITE:
                self.faults.let_a_write_fail()
            await asyncio.sleep(seconds / 2)
            await disturbing
            self._check_size()
            if LOG_FAILED in self.broker.stderr() and end in (REST, STOP):
                end = KILL
            if end == REST:
                await self._leave(setting, tasks)
            else:
                await asyncio.to_thread(self._end_life, end)
                setting.is_over = True
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
        has_log_failed = LOG_FAILED in self.broker.stderr()
        self.counts["logs that failed"] += has_log_failed
        self.model.claim(NOT_ERASED not in self.broker.stderr(), "a failed write was not erased")
        return end

    async def _leave(self, setting: Setting, tasks: list[asyncio.Task[None]]) -> None:
        """Requests under way are answered; streams are closed."""
        setting.is_over = True
        await asyncio.wait(tasks, timeout=1.5)
        for task in tasks:
            task.cancel()

    def _works(self, setting: Setting) -> list[Any]:
        works: list[Any] = [Churn(setting, setting.new_rng()).run()]
        for topic in self.model.topics.values():
            name = f"{topic.name}-{self.model.round}"
            works += [Producer(setting, topic, f"{name}-{n}").run() for n in range(2)]
            for group in (WORKERS, "others"):
                works += [Consumer(setting, topic, group, f"{name}-{n}").run() for n in range(2)]
            works.append(Publisher(setting, topic, REPORTS).run())
            works.append(Effects(setting, topic, WORKERS).run())
        works += StreamLoad(setting, self.stream).works()
        return works + NamespaceLoad(setting, self.namespace).works()

    # -- the broker's lives ---------------------------------------------------------------------

    def _start(self) -> None:
        self.faults.mend()
        self._lives += 1
        self.broker.start()

    def _end_life(self, end: str) -> None:
        self.counts[{STOP: "stops", KILL: "kills", FAILING_WRITE: "kills"}[end]] += 1
        if end == STOP:
            self.faults.mend()
            code = self.broker.terminate(PATIENCE_S)
            self.model.claim(code == 0, f"SIGTERM ended the broker with {code}")
        else:
            is_there = self.broker.is_running() or end == FAILING_WRITE
            self.model.claim(is_there, "the broker ended by itself")
            self.broker.kill()

    def _verify_directory(self) -> None:
        data = self.broker.data_dir
        assert data is not None
        report = offline.verify(Vfs(), str(data))
        self.model.claim(report.damage is None, f"wal verify: {report.damage}")
        damaged = [file for file in report.files if file.state != "sound"]
        self.model.claim(not damaged, f"wal verify: {damaged}")
        self.counts["wal verify"] += 1

    def _check_size(self) -> None:
        if self.broker.is_running():
            rss, files = self.broker.rss_bytes(), self.broker.open_files()
            self.counts["most MiB"] = max(self.counts["most MiB"], rss >> 20)
            self.counts["most files"] = max(self.counts["most files"], files)
            self.model.claim(rss < MOST_RSS_BYTES, f"the broker takes {rss:,} bytes")
            self.model.claim(files < MOST_FILES, f"the broker has {files} files open")

    # -- at rest --------------------------------------------------------------------------------

    def _look(self, *, has_restarted: bool) -> None:
        self.faults.mend()
        self._limit_topics(False)
        eventually(self._storing, lambda storing: storing == 0, PATIENCE_S)
        self._queue_checks.check(with_audit=self.model.round % LONG_LOOK_EVERY == 0)
        if self.model.round % LONG_LOOK_EVERY == 1:
            self._journal_checks.check()
        self._namespace_checks.check(has_restarted=has_restarted)
        self._stream_checks.check(with_drain=self.model.round % LONG_LOOK_EVERY == 2)

    def _storing(self) -> int:
        """Batches of rows that are committed and not stored whole."""
        text = self.broker.client.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("penstock_storing_batches ")]
        return int(float(lines[0].split()[1]))

    def _judge(self, when: str) -> None:
        for error in tracebacks(self.broker.stderr()):
            is_ours = error.startswith(("OSError: [Errno 5]", "OSError: [Errno 28]"))
            self.model.claim(is_ours, f"a traceback in the broker's log: {error}")
        if self.model.violations:
            self._note({"violations": self.model.violations})
            few = "\n".join(self.model.violations[:20])
            raise SoakFailed(
                f"after {when}: {len(self.model.violations)} violations; seed {self.seed}, "
                f"directory {self.directory}\n{few}"
            )

    # -- topics ---------------------------------------------------------------------------------

    def _make_topic(self) -> None:
        self._made += 1
        partitions = self.rng.randint(1, 3)
        topic = Topic(f"work-{self._made}", partitions, (WORKERS, "others", REPORTS))
        topic.has_retention = self._made % 3 == 0
        client = self.broker.client
        body: dict[str, Any] = {"name": topic.name, "partitions": partitions}
        if self._features.topics_limit_attempts and self.rng.random() < 0.5:
            topic.max_attempts = body["max_attempts"] = self.rng.randint(2, 6)
        reply = client.post("/v1/topics", json=body)
        assert reply.status_code == 201, reply.text
        topic.topic_id = client.get(f"/v1/topics/{topic.name}/offsets").json()["topic_id"]
        for group in topic.groups:
            nothing = {"partitions": [{"partition": 0, "next": 0}]}
            reply = client.post(f"/v1/topics/{topic.name}/groups/{group}/progress", json=nothing)
            assert reply.status_code == 200, reply.text
        self.model.topics[topic.name] = topic

    def _retire_topics(self) -> None:
        for topic in list(self.model.topics.values()):
            if len(topic.sent) > MOST_SENT:
                for name in (topic.name, topic.dead_letters):
                    reply = self.broker.client.delete(f"/v1/topics/{name}")
                    assert reply.status_code in (204, 404), reply.text
                del self.model.topics[topic.name]
                self._make_topic()

    def _limit_topics(self, is_limited: bool) -> None:
        """Retention acts while clients work, and not while everything is looked at."""
        self._stream_checks.limit(is_limited)
        for topic in self.model.topics.values():
            if topic.has_retention:
                body = {"retention_bytes": 20_000 if is_limited else 0}
                reply = self.broker.client.patch(f"/v1/topics/{topic.name}", json=body)
                assert reply.status_code == 204, reply.text

    # -- for whoever looks into a failure -------------------------------------------------------

    def _note(self, what: dict[str, Any]) -> None:
        with (self.directory / "history.jsonl").open("a") as history:
            history.write(
                json.dumps({"at_s": round(time.monotonic() - self._began, 2)} | what) + "\n"
            )

    def _keep_log(self) -> None:
        (self.directory / "broker.log").write_text(self.broker.stderr())
