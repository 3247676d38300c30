"""The addresses of a client's brokers, and which of them gets a request. No IO.

A client of a cluster has several addresses: those that it was given, and those in the map of the
cluster. The owner comes first; an address that failed is left alone for a while, unless there is no
other. Invariant: an address from the map is used only if its scheme is that of the given ones, so
that a token never leaves on a weaker connection than its user chose. Threads may share a book. Must
not know how requests are sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec

from penstock.client.credentials import DEFAULT_URL
from penstock.model.errors import InvalidArgument

MAP_PATH = "/v1/cluster"
MAP_AGE_S = 30.0
"""How old the map may become: after a move, the owner before forwards without a failure."""
FIRST_MAP_PAUSE_S = 0.25
LONGEST_MAP_PAUSE_S = 5.0
"""The pause between two readings of the map, while it names an owner that does not answer."""
FIRST_AVOIDED_S = 0.5
LONGEST_AVOIDED_S = 16.0
"""How long an address is left alone after it failed once, and at most after several times."""
MOST_GIVEN = 100
MOST_LEARNED = 1000
MOST_TRIED = 8
"""How many addresses one request tries."""


class MappedBroker(msgspec.Struct):
    name: str = ""
    url: str = ""
    state: str = ""


class MappedOwner(msgspec.Struct):
    url: str = ""
    epoch: int = 0


class ClusterAddresses(msgspec.Struct):
    """The part of the map of a cluster that a client needs."""

    name: str = ""
    brokers: list[MappedBroker] = []
    shards: list[MappedOwner] = []


class _Failure(msgspec.Struct):
    until: float
    length_s: float
    epoch: int


_read_map = msgspec.json.Decoder(ClusterAddresses).decode


def addresses_of(text: str) -> tuple[str, ...]:
    """Returns the addresses in a text, which commas separate. Raises InvalidArgument."""
    found = dict.fromkeys(_checked(each.strip()) for each in text.split(",") if each.strip())
    if not found:
        raise no_address(text)
    if len(found) > MOST_GIVEN:
        raise InvalidArgument(f"{len(found)} addresses are too many; give at most {MOST_GIVEN}")
    if len({urlsplit(each).scheme for each in found}) > 1:
        raise InvalidArgument(
            "some addresses begin with https:// and others with http://: give all brokers of a "
            "cluster the same scheme"
        )
    return tuple(found)


class AddressBook:
    """`text` is what the user gave. `has_several`: there is more than one address to choose
    from; otherwise nothing of a cluster is asked or tried."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = text
        self.given = addresses_of(text)
        self.first = self.given[0]
        self.has_several = len(self.given) > 1
        self._scheme = urlsplit(self.first).scheme
        self._clock = clock
        self._lock = threading.Lock()
        self._learned: tuple[str, ...] = ()
        self._owner = ""
        self._epoch = 0
        self._last_good = ""
        self._failures: dict[str, _Failure] = {}
        self._is_reading = False
        self._is_doubted = True
        self._read_at = 0.0
        self._next_read = 0.0
        self._map_pause_s = FIRST_MAP_PAUSE_S

    # -- choosing ------------------------------------------------------------------------------

    def next(self, tried: Collection[str] = ()) -> str | None:
        """Returns the best address that was not tried, or None."""
        with self._lock:
            if len(tried) >= MOST_TRIED:
                return None
            left = [each for each in self._candidates() if each not in tried]
            now = self._clock()
            for each in left:
                if self._avoided_until(each) <= now:
                    return each
            return min(left, key=self._avoided_until, default=None)

    def answered(self, address: str) -> None:
        with self._lock:
            self._failures.pop(address, None)
            self._last_good = address

    def failed(self, address: str) -> None:
        """The address did not answer: another one is better for a while."""
        with self._lock:
            before = self._failures.get(address)
            length_s = FIRST_AVOIDED_S if before is None else 2 * before.length_s
            self._avoid(address, min(length_s, LONGEST_AVOIDED_S))
            self._is_doubted = True

    def refused(self, address: str) -> None:
        """The broker answered that it cannot serve now."""
        with self._lock:
            self._avoid(address, FIRST_AVOIDED_S)
            self._is_doubted = True

    def doubt(self) -> None:
        """The owner may be another one: reads the map before the next request."""
        with self._lock:
            self._is_doubted = True

    # -- the map -------------------------------------------------------------------------------

    def begin_reading(self) -> bool:
        """Tells whether the caller is to read the map now. It calls `end_reading` afterwards;
        others do not wait for it."""
        with self._lock:
            now = self._clock()
            is_due = self._is_doubted or now - self._read_at >= MAP_AGE_S
            if not self.has_several or self._is_reading or not is_due or now < self._next_read:
                return False
            self._is_reading = True
            return True

    def end_reading(self) -> None:
        with self._lock:
            self._is_reading = False
            if self._is_doubted:
                self._pause_reading()

    def learn(self, status: int, body: bytes) -> bool:
        """Takes in a broker's answer. Returns whether it was one that says something: a broker
        that is in no cluster says so, and an older one does not know the path."""
        if status == 404:
            found = ClusterAddresses()
        elif status != 200:
            return False
        else:
            try:
                found = _read_map(body)
            except (msgspec.DecodeError, ValueError):
                return False
        with self._lock:
            self._take_map(found)
        return True

    def _take_map(self, found: ClusterAddresses) -> None:
        owner = next((each for each in found.shards if self._may_use(each.url)), MappedOwner())
        self._owner, self._epoch = owner.url.rstrip("/"), owner.epoch
        names = [each.url for each in found.brokers if each.state != "gone"]
        usable = (each.rstrip("/") for each in names[:MOST_LEARNED] if self._may_use(each))
        self._learned = tuple(dict.fromkeys(usable))
        failure = self._failures.get(self._owner)
        if failure is not None and failure.epoch < self._epoch:
            # It has become the owner after it failed, so it is there again.
            del self._failures[self._owner]
            failure = None
        self._read_at = self._clock()
        self._is_doubted = failure is not None or bool(found.name and not owner.url)
        if not self._is_doubted:
            self._map_pause_s = FIRST_MAP_PAUSE_S

    # -- inside, with the lock -----------------------------------------------------------------

    def _candidates(self) -> list[str]:
        known = (*self.given, *self._learned)
        first = [self._owner] if self._owner else []
        if self._last_good in known:
            first.append(self._last_good)
        return list(dict.fromkeys([*first, *known]))

    def _avoided_until(self, address: str) -> float:
        failure = self._failures.get(address)
        return 0.0 if failure is None else failure.until

    def _avoid(self, address: str, length_s: float) -> None:
        self._failures[address] = _Failure(self._clock() + length_s, length_s, self._epoch)
        if len(self._failures) > MOST_GIVEN + MOST_LEARNED:
            del self._failures[next(iter(self._failures))]

    def _pause_reading(self) -> None:
        self._next_read = self._clock() + self._map_pause_s
        self._map_pause_s = min(2 * self._map_pause_s, LONGEST_MAP_PAUSE_S)

    def _may_use(self, url: str) -> bool:
        """Returns whether requests may go to an address from the map."""
        parts = _split(url)
        if parts is None or parts.scheme != self._scheme:
            return False
        return not (parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc)


def _checked(url: str) -> str:
    if _split(url) is None:
        raise no_address(url)
    return url.rstrip("/")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        return None
    return parts if parts.scheme in ("http", "https") and parts.netloc else None


def no_address(url: str) -> InvalidArgument:
    return InvalidArgument(f"{url!r} is no broker's address; an address looks like {DEFAULT_URL}")
