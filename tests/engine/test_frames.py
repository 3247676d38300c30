"""What a crash keeps is whole frames: after each one of them, a start must find nothing amiss.

A history is lived through; then its log is replayed frame by frame, and each time the state is
looked at that a broker would start with, had the crash come there.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.invariants import check
from penstock.core.state import BrokerState, apply
from penstock.model.envelope import Envelope
from penstock.model.limits import KIB, Limits
from penstock.model.progress import Reached
from penstock.model.records import (
    DEAD_LETTERED,
    Advanced,
    Finished,
    Message,
    Record,
    Skipped,
    decode_record,
)
from penstock.storage.log import WalOptions
from penstock.storage.segments import decode_header, records_of, walk_frames
from tests.engine.harness import LONG_MS, Broker, on_disk, policy, segment_paths


def frames(broker: Broker) -> Iterator[list[Record]]:
    for path in segment_paths(broker.disk):
        data = broker.disk.content(path)
        header = decode_header(data)
        if header is not None:
            for frame in walk_frames(data, header):
                yield [decode_record(data) for _, data in records_of(path, data, frame)]


class Crash:
    """The state after the frames so far, and what was recorded as done."""

    def __init__(self, limits: Limits) -> None:
        self.state = BrokerState(limits)
        self.stored: dict[tuple[int, int], set[int]] = {}
        self.done: dict[tuple[int, int], set[int]] = {}
        self.copies = 0
        self.buried = 0

    def take(self, record: Record) -> None:
        apply(self.state, record)
        if isinstance(record, Message):
            self.stored.setdefault((record.topic_id, record.partition), set()).add(record.offset)
            self.copies += record.envelope is not None and record.envelope.dlq is not None
        elif isinstance(record, Finished | Skipped):
            done = self.done.setdefault((record.group_id, record.partition), set())
            assert record.offset not in done, "done twice"
            done.add(record.offset)
            self.buried += isinstance(record, Finished) and record.how == DEAD_LETTERED

    def check(self) -> None:
        check(self.state)
        assert self.copies == self.buried, "a dead letter and the end of its message are one"
        for group in self.state.groups.values():
            for progress in group.progress:
                stored = self.stored.get((group.topic.id, progress.partition), set())
                passed = {offset for offset in stored if offset < progress.cursor}
                done = self.done.get((group.id, progress.partition), set())
                lost = passed - done - set(progress.unfinished)
                assert not lost, f"the cursor passed {lost}, which nobody was given"


def check_every_crash(broker: Broker) -> int:
    """The number of frames looked at. The log must not have been sealed."""
    crash = Crash(broker.limits)
    count = 0
    for records in frames(broker):
        for record in records:
            crash.take(record)
        crash.check()
        count += 1
    return count


def test_the_deliveries_of_a_turn_are_kept_together():
    """driftq-30, 46: several consumers' offsets interleave, and the cursor passes them all."""
    broker = on_disk(limits=Limits(max_in_flight=100))
    broker.topic("t", 2)
    for n in range(3):
        broker.consume(owner=f"o{n}", lease_ms=200)
    for _ in range(10):
        commands = [broker.command("t", f"v{n}", key=f"k{n}") for n in range(7)]
        broker.must(broker.engine.produce_many, commands)
        broker.pass_ms(70)
    assert check_every_crash(broker) > 20
    broker.close()


def test_a_dead_letter_and_the_end_of_its_message_are_kept_together():
    """driftq-39: once, even across a crash at any instant."""
    broker = on_disk(limits=Limits(max_in_flight=100))
    broker.topic("t", 2)
    reader = broker.consume(lease_ms=300)
    for n in range(8):
        broker.produce("t", f"v{n}", key=f"k{n}", envelope=policy(1 + n % 2, 20))
        for item in reader.take():
            if item.offset % 3:
                assert broker.nack(reader, item) is None
        broker.pass_ms(100)
    broker.pass_ms(1000)
    assert sum(len(broker.stored("dlq.t", p)) for p in range(2)) == 8
    assert check_every_crash(broker) > 20
    broker.close()


def test_progress_that_is_published_together_is_kept_together():
    """Also where a frame is full in the middle of it."""
    options = WalOptions(segment_bytes=256 * KIB, reserve_bytes=0, frame_bytes=512)
    broker = on_disk(options=options)
    broker.topic("t", 8)
    for partition in range(8):
        broker.produce("t", "v", envelope=Envelope(partition_override=partition))
    reached = [Reached(partition, partition + 1) for partition in range(8)]
    for n in range(20):
        # It is counted, then decided: the message is before it in the frame, and ever larger.
        broker.submit(broker.engine.set_progress, "t", f"g{n}", reached)
        broker.submit(broker.engine.produce, broker.command("t", "." * (n * 25 + 1)))
        broker.settle()
    found = [[r for r in records if isinstance(r, Advanced)] for records in frames(broker)]
    assert [len(advanced) for advanced in found if advanced] == [8] * 20
    broker.close()


def test_what_is_skipped_for_its_effect_is_recorded_where_it_is_passed():
    """driftq-61, 51: between deliveries to several consumers."""
    broker = on_disk(limits=Limits(max_in_flight=100))
    broker.topic()
    for key in ("k2", "k3", "k7"):
        assert broker.begin(key) is None
        assert broker.commit(key) is None
    for n in range(10):
        broker.produce("t", f"v{n}", envelope=Envelope(idempotency_key=f"k{n}"))
    readers = [broker.consume(owner=f"o{n}", lease_ms=LONG_MS) for n in range(2)]
    given = sorted(offset for reader in readers for offset in reader.offsets())
    assert given == [0, 1, 4, 5, 6, 8, 9]
    assert check_every_crash(broker) > 10
    broker.crash()
    again = broker.consume(lease_ms=LONG_MS)
    assert sorted(again.offsets()) == given
    progress = broker.state.topics["t"].groups["g"].progress[0]
    assert sorted(progress.unfinished) == given
    broker.close()
