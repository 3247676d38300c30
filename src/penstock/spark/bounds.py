"""The bounds of a read: times, offsets and positions, as users give them in options.

Invariant: a bound that has no meaning for the log that is read is refused by the option's name, as
is an end before the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.model.errors import InvalidArgument
from penstock.model.options import WrongValue, whole_number

LogName = Literal["records", "journal", "events"]
"""The messages of topics, the journal, or the events of durable streams."""

NUMBER = whole_number(0, 2**63 - 1)

Given = str | int | dict[str, int | dict[int, int]]
"""`earliest`, `latest`, a position of the journal, or offsets by stream, or by topic and
partition."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The start or the end of a read: a time, offsets by topic and partition, or `default`, which
    is also used for partitions that `offsets` does not have."""

    default: Literal["earliest", "latest"]
    time_ms: int | None = None
    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    position: int | None = None
    """A position in the journal, which has no partitions."""


EARLIEST = Bound(default="earliest")
LATEST = Bound(default="latest")


def parse_offsets(text: str) -> Given:
    word = text.strip()
    if word.lower() in ("earliest", "latest"):
        return word.lower()
    if word.isdigit():
        return _offset(int(word))
    try:
        given = json.loads(word)
    except ValueError:
        raise WrongValue from None
    if not isinstance(given, dict):
        raise WrongValue
    return {name: _offsets_of(name, value) for name, value in given.items()}


def _offsets_of(topic: str, partitions: object) -> int | dict[int, int]:
    if isinstance(partitions, int):
        return _offset(partitions)
    if not isinstance(partitions, dict):
        raise WrongValue(
            f"has no partitions for topic {topic!r}: write {{{json.dumps(topic)}: {{}}}}"
        )
    return {NUMBER.parse(partition): _offset(offset) for partition, offset in partitions.items()}


def _offset(offset: object) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= 2**63 - 1:
        raise WrongValue
    return offset


def bound_of(what: str, values: dict[str, Any], log: LogName, usual: Bound) -> Bound | None:
    """Takes the two options that can set a bound out of the values."""
    time_ms = values.pop(f"{what}_timestamp", None)
    offsets = values.pop(f"{what}_offsets", None)
    option = f"option {what}Offsets"
    if time_ms is not None and offsets is not None:
        raise InvalidArgument(f"{option} and {what}Timestamp exclude each other: give one of them")
    if time_ms is not None:
        return Bound(default=usual.default, time_ms=time_ms)
    if offsets is None:
        return None
    if isinstance(offsets, str):
        return EARLIEST if offsets == "earliest" else LATEST
    if isinstance(offsets, int):
        if log != "journal":
            raise InvalidArgument(f"{option}: a single number is a position of log=journal")
        return Bound(default=usual.default, position=offsets)
    if log == "journal":
        if set(offsets) == {"journal"} and isinstance(offsets["journal"], int):
            return Bound(default=usual.default, position=offsets["journal"])
        raise InvalidArgument(f"{option}: log=journal has one position, like 123, and no topics")
    return Bound(default=usual.default, offsets=_by_partition(option, offsets, log))


def _by_partition(
    option: str, offsets: dict[str, int | dict[int, int]], log: LogName
) -> dict[str, dict[int, int]]:
    """Returns offsets by topic and partition. A stream counts as a topic with one partition."""
    found: dict[str, dict[int, int]] = {}
    for name, given in offsets.items():
        if log == "events" and isinstance(given, int):
            found[name] = {0: given}
        elif log == "records" and not isinstance(given, int):
            found[name] = given
        elif log == "events":
            raise InvalidArgument(
                f"{option}: a stream has no partitions: write {{{json.dumps(name)}: 12}}"
            )
        else:
            raise InvalidArgument(
                f"{option}: {given} has no partitions for topic {name!r}: write "
                f'{{{json.dumps(name)}: {{"0": {given}}}}}'
            )
    return found


def check_order(start: Bound, end: Bound, log: LogName) -> None:
    """Refuses a read that ends before it begins: it would have no rows, and the user would not see
    why. A read that ends where it begins is allowed: there may be nothing new to read."""
    if start.time_ms is not None and end.time_ms is not None and end.time_ms <= start.time_ms:
        raise InvalidArgument(
            "option endingTimestamp is not after startingTimestamp: there can be no rows"
        )
    for name, first, last in _offsets_in_both(start, end, log):
        if last < first:
            raise InvalidArgument(
                f"option endingOffsets is below startingOffsets: {name} would be read from "
                f"{first} to {last}"
            )


def _offsets_in_both(start: Bound, end: Bound, log: LogName) -> Iterator[tuple[str, int, int]]:
    if start.position is not None and end.position is not None:
        yield "the journal", start.position, end.position
    for topic, partitions in start.offsets.items():
        ends = end.offsets.get(topic, {})
        for each in sorted(partitions.keys() & ends.keys()):
            name = f"topic {topic!r} partition {each}"
            if log == "events":
                name = f"stream {topic!r}"
            yield name, partitions[each], ends[each]
