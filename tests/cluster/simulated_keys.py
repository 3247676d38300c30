"""A `KeyStore` in memory, with the faults of a replicated one.

`SimulatedKeys` is the store at the service. `handle(process)` gives what one broker uses. Besides
the faults of every request (`Faults`) it has: a leader without quorum, brokers that talk to an old
leader, watches that stall or leave out values that have changed again.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.cluster.shared import Conflict, StoredKey, Unanswered
from tests.cluster.simulated_service import Faults, Feed, Reply, Service
from tests.cluster.simulation import SimulatedProcess, Simulation


class SimulatedKeys(Service):
    """`entries` has the committed values, `history` every value that was ever committed, in order:
    (time, key, value or None)."""

    def __init__(self, simulation: Simulation, faults: Faults | None = None) -> None:
        super().__init__(simulation, faults)
        self.entries: dict[str, StoredKey] = {}
        self.history: list[tuple[int, str, bytes | None]] = []
        self.has_quorum = True
        self._revision = 0
        self._proposed: list[tuple[str, bytes, Reply]] = []
        self._seen_by_isolated: dict[SimulatedProcess, dict[str, StoredKey]] = {}
        self._watches: list[_Watch] = []

    def handle(self, process: SimulatedProcess) -> KeysHandle:
        return KeysHandle(self, process)

    # -- what a test does to the store ----------------------------------------------------------

    def set(self, key: str, value: bytes) -> int:
        """Sets a value at once, whatever was there. Returns the new revision."""
        self._revision += 1
        self.entries[key] = StoredKey(value, self._revision)
        self.history.append((self.simulation.now_ms, key, value))
        self._changed(key)
        return self._revision

    def delete(self, key: str) -> None:
        """Removes a key, as somebody does by hand."""
        self._revision += 1
        self.entries.pop(key, None)
        self.history.append((self.simulation.now_ms, key, None))
        self._changed(key)

    def lose_quorum(self) -> None:
        """Puts are neither committed nor answered from now on; reads still are."""
        self.has_quorum = False

    def regain_quorum(self, committed: int | None = None) -> None:
        """Commits the first `committed` of the proposed puts; the others never were. None: as the
        seed draws it."""
        proposed, self._proposed = self._proposed, []
        self.has_quorum = True
        if committed is None:
            committed = self.simulation.random.randint(0, len(proposed))
        for key, value, reply in proposed[:committed]:
            reply(self.set(key, value))

    def make_anew(self) -> None:
        """Somebody deletes the whole store, and it is made again: empty, with low revisions."""
        self.entries.clear()
        self._revision = 0
        self._proposed.clear()

    def isolate(self, process: SimulatedProcess, seen: dict[str, StoredKey] | None = None) -> None:
        """From now on this process talks to an old leader: it reads old values (`seen`, or those
        of now), and what it puts is lost."""
        self._seen_by_isolated[process] = dict(self.entries if seen is None else seen)

    def rejoin(self, process: SimulatedProcess) -> None:
        if self._seen_by_isolated.pop(process, None) is not None:
            self.wake()

    def stall(self, process: SimulatedProcess) -> None:
        """The watches of this process are told nothing more, until `release`."""
        for watch in self._watches:
            if watch.process is process:
                watch.is_stalled = True

    def release(self, process: SimulatedProcess) -> None:
        for watch in self._watches:
            if watch.process is process:
                watch.is_stalled = False
        self.wake()

    def without_faults(self) -> None:
        for process in list(self._seen_by_isolated):
            self.rejoin(process)
        if not self.has_quorum:
            self.regain_quorum()
        for watch in self._watches:
            watch.is_stalled = False
        super().without_faults()

    def wake(self) -> None:
        self._watches = [watch for watch in self._watches if not watch.is_closed]
        for watch in self._watches:
            watch.wake()

    # -- what handles and watches use -----------------------------------------------------------

    def seen_by(self, process: SimulatedProcess) -> dict[str, StoredKey]:
        return self._seen_by_isolated.get(process, self.entries)

    def get(self, process: SimulatedProcess, key: str, reply: Reply) -> None:
        reply(self.seen_by(process).get(key))

    def put(
        self, process: SimulatedProcess, key: str, value: bytes, revision: int, reply: Reply
    ) -> None:
        held = self.seen_by(process).get(key)
        is_proposed = any(key == proposed for proposed, _, _ in self._proposed)
        if is_proposed or (held.revision if held else 0) != revision:
            reply(Conflict())
        elif process in self._seen_by_isolated:
            return  # an old leader proposes it in vain
        elif self.has_quorum:
            reply(self.set(key, value))
        else:
            self._proposed.append((key, value, reply))

    def open_watch(
        self,
        process: SimulatedProcess,
        prefix: str,
        changed: Callable[[str, StoredKey | None], None],
    ) -> _Watch:
        watch = _Watch(self, process, prefix, changed)
        self._watches.append(watch)
        watch.wake()
        return watch

    def _changed(self, key: str) -> None:
        for watch in self._watches:
            watch.note(key)
        self.wake()


class KeysHandle:
    """The `KeyStore` of one broker."""

    def __init__(self, keys: SimulatedKeys, process: SimulatedProcess) -> None:
        self.keys = keys
        self.process = process

    def get(self, key: str, done: Callable[[StoredKey | Unanswered | None], None]) -> None:
        self.keys.request(
            self.process, f"get {key}", lambda reply: self.keys.get(self.process, key, reply), done
        )

    def put(
        self,
        key: str,
        value: bytes,
        revision: int,
        done: Callable[[int | Conflict | Unanswered], None],
    ) -> None:
        def work(reply: Reply) -> None:
            self.keys.put(self.process, key, value, revision, reply)

        self.keys.request(self.process, f"put {key}", work, done)

    def watch(self, prefix: str, changed: Callable[[str, StoredKey | None], None]) -> _Watch:
        return self.keys.open_watch(self.process, prefix, changed)


class _Watch(Feed):
    """Tells of the keys that begin with `prefix`: their last values, when it comes to it."""

    def __init__(
        self,
        keys: SimulatedKeys,
        process: SimulatedProcess,
        prefix: str,
        changed: Callable[[str, StoredKey | None], None],
    ) -> None:
        super().__init__(keys, process)
        self._keys = keys
        self._prefix = prefix
        self._tell = changed
        self._news = dict.fromkeys(key for key in keys.seen_by(process) if key.startswith(prefix))

    def note(self, key: str) -> None:
        if key.startswith(self._prefix):
            self._news.pop(key, None)
            self._news[key] = None

    def send(self) -> None:
        seen = self._keys.seen_by(self.process)
        if seen is not self._keys.entries:
            return  # an old leader has no news
        news, self._news = self._news, {}
        for key in news:
            self._send(key, seen.get(key))

    def _send(self, key: str, entry: StoredKey | None) -> None:
        self.arrive(lambda: self._tell(key, entry))
