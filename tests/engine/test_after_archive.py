"""after_archive: of such a topic nothing goes before the group `archive` has finished it."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from penstock.core.image import decode_image, encode_image, restore_image, take_image
from penstock.core.invariants import check
from penstock.model.errors import FailedPrecondition, ResourceExhausted
from penstock.model.limits import KIB, Limits
from penstock.model.progress import Reached
from penstock.model.records import TopicConfigured, TopicCreated, decode_record, encode_record
from tests.engine.harness import Broker, on_disk, values

RETENTION_MS = 1000


def create(broker: Broker, name: str = "t", after_archive: bool | None = True) -> Any:
    return broker.call(partial(broker.engine.create_topic, after_archive=after_archive), name, 1)


def configure(broker: Broker, age: int | None, size: int | None, archive: bool | None) -> None:
    broker.must(partial(broker.engine.configure_topic, after_archive=archive), "t", age, size)


def advance(broker: Broker, group: str, next_offset: int) -> None:
    broker.must(broker.engine.set_progress, "t", group, [Reached(0, next_offset)])


def kept(broker: Broker) -> str:
    """What is there once retention has been at work."""
    broker.pass_ms(5 * RETENTION_MS)
    check(broker.state)
    return "".join(values(broker.stored("t")))


def filled(on_a_disk: bool = True) -> Broker:
    """Six messages that are past their time and finished by a group."""
    broker = on_disk() if on_a_disk else Broker()
    assert create(broker) is True
    configure(broker, RETENTION_MS, None, None)
    broker.put("t", *"abcdef")
    advance(broker, "g", 6)
    return broker


@pytest.mark.parametrize("on_a_disk", [True, False], ids=["disk", "memory"])
def test_nothing_goes_before_there_is_an_archive_and_then_what_it_has_finished(on_a_disk: bool):
    broker = filled(on_a_disk)
    assert kept(broker) == "abcdef"
    advance(broker, "archive", 0)
    assert kept(broker) == "abcdef"
    advance(broker, "archive", 2)
    assert kept(broker) == "cdef"
    advance(broker, "archive", 6)
    assert kept(broker) == ""
    broker.close()


def test_another_group_keeps_what_is_archived_all_the_same():
    broker = filled()
    advance(broker, "archive", 6)
    advance(broker, "behind", 3)
    assert kept(broker) == "def"
    broker.close()


def test_by_bytes_too_only_what_is_archived_goes():
    broker = filled()
    configure(broker, 0, 2, None)
    assert kept(broker) == "abcdef"
    advance(broker, "archive", 3)
    assert kept(broker) == "def"
    broker.close()


def test_nothing_goes_any_more_when_the_group_is_deleted():
    broker = filled()
    advance(broker, "archive", 2)
    assert kept(broker) == "cdef"
    broker.must(broker.engine.delete_group, "t", "archive")
    assert kept(broker) == "cdef"
    advance(broker, "archive", 3)
    assert kept(broker) == "def"
    broker.close()


def test_a_consumer_of_the_group_archives_as_well_by_its_acks():
    broker = filled()
    reader = broker.consume(group="archive")
    first, second, *_ = reader.take()
    assert broker.ack(reader, second) is None
    assert kept(broker) == "abcdef"
    assert broker.ack(reader, first) is None
    assert kept(broker) == "cdef"
    broker.close()


def test_a_topic_without_it_waits_for_no_archive_and_it_can_be_taken_back():
    broker = filled()
    assert kept(broker) == "abcdef"
    configure(broker, None, None, False)
    assert kept(broker) == ""
    broker.close()


@pytest.mark.parametrize("restart", [Broker.restart, Broker.crash, Broker.seal_and_crash])
@pytest.mark.parametrize("is_created_so", [True, False])
def test_it_is_the_same_after_a_restart(restart: Any, is_created_so: bool):
    broker = on_disk()
    create(broker, after_archive=is_created_so)
    configure(broker, RETENTION_MS, None, None if is_created_so else True)
    broker.put("t", *"abc")
    advance(broker, "g", 3)
    restart(broker)
    assert broker.must(broker.engine.describe_topic, "t").after_archive is True
    assert kept(broker) == "abc"
    advance(broker, "archive", 2)
    restart(broker)
    # What is sealed goes by the batch, once all of it is archived.
    assert kept(broker) == ("abc" if restart is Broker.seal_and_crash else "c")
    advance(broker, "archive", 3)
    restart(broker)
    assert kept(broker) == ""
    broker.close()


def test_memory_is_not_made_free_of_what_is_not_archived():
    broker = Broker(limits=Limits(memory_bytes=64 * KIB))
    create(broker)
    outcome: Any = None
    for offset in range(2000):
        outcome = broker.try_produce("t", "v" * 500)
        if isinstance(outcome, ResourceExhausted):
            break
        advance(broker, "g", offset + 1)
    assert isinstance(outcome, ResourceExhausted)
    end = broker.state.topics["t"].next_offset
    assert broker.state.topics["t"].partitions[0].first_offset == 0
    advance(broker, "archive", end)
    broker.put("t", "there is room")
    assert broker.state.topics["t"].partitions[0].first_offset > 0
    check(broker.state)
    broker.close()


def test_creating_a_topic_with_another_after_archive_is_refused():
    broker = Broker()
    assert create(broker, "plain", None) is True
    assert broker.must(broker.engine.describe_topic, "plain").after_archive is False
    assert isinstance(create(broker, "plain", True), FailedPrecondition)
    assert create(broker, "plain", False) is False
    assert create(broker, "kept", True) is True
    assert isinstance(create(broker, "kept", False), FailedPrecondition)
    assert create(broker, "kept", None) is False
    broker.close()


def test_records_and_images_of_before_have_topics_without_it():
    for record in (TopicCreated(1, 5, "t", 2, True), TopicConfigured(1, 6, 7, 8, True)):
        fields = msgspec.msgpack.decode(encode_record(record))
        assert fields[-4:] == [True, 0, 0, 0]
        old = decode_record(msgspec.msgpack.encode(fields[:-4]))
        assert old == msgspec.structs.replace(record, after_archive=False)
    broker = filled()
    image = msgspec.msgpack.decode(encode_image(take_image(broker.state)))
    topics = image[2]
    assert topics[0][-5:] == [True, 0, 0, 0, []]
    del topics[0][-5:]
    restored = restore_image(decode_image(msgspec.msgpack.encode(image)), broker.limits)
    assert restored.topics["t"].after_archive is False
    assert restored.topics["t"].retention_ms == RETENTION_MS
    broker.close()
