"""What clients of durable caches were told, and what must therefore be found after a crash.

Invariants checked: an acknowledged write is there; one that was in flight is there whole or not at
all; a transaction is never half there; no counter gives a number twice; versions never go back.
Violations are gathered, so that one does not hide the others. Knows no connection.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

CACHES = ("orders", "totals")
LONG_TTL_MS = 3_600_000


class Held(NamedTuple):
    """What a key has; a value of None is nothing."""

    value: bytes | None
    version: int


class Ledger:
    def __init__(self) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self._told: dict[str, Held] = {}
        self._asked: dict[str, bytes | None] = {}
        self._versions = dict.fromkeys(CACHES, 0)
        self._seen_versions: set[tuple[str, int]] = set()
        self._numbers: set[int] = set()
        self._counted = 0
        self._in_flight = 0
        self._token = b""
        self._asked_token: bytes | None = None

    # -- keys with one writer ------------------------------------------------------------------

    def version_of(self, key: str) -> int:
        return self._told[key].version if key in self._told else 0

    def asked(self, key: str, value: bytes | None) -> None:
        self._asked[key] = value

    def told(self, cache: str, key: str, version: int) -> None:
        """The write that was asked for is acknowledged; a version of 0 changed nothing."""
        value = self._asked.pop(key)
        self.counts["removed" if value is None else "written"] += 1
        if version:
            self._note_version(cache, version)
        self._told[key] = Held(value, version if value is not None else 0)

    def refused(self, key: str) -> None:
        """The broker said that the write is not made."""
        self._asked.pop(key)

    def known_keys(self) -> list[str]:
        return sorted({*self._told, *self._asked})

    def found(self, key: str, value: bytes | None, version: int) -> None:
        """After a start: as it was told, or as it was asked for last."""
        told = self._told.get(key, Held(None, 0))
        is_as_told = (value, version) == told
        is_as_asked = key in self._asked and value == self._asked[key]
        if is_as_asked and not is_as_told:
            self.counts["in flight, there"] += 1
            is_newer = value is None or version > told.version
            self._expect(is_newer, f"{key}: version {version} after {told.version}")
        else:
            self.counts["in flight, lost"] += key in self._asked
            self._expect(is_as_told, f"{key}: found {(value, version)}, told {told}")
        self._asked.pop(key, None)
        self._told[key] = Held(value, version)

    # -- a counter with many clients -----------------------------------------------------------

    def counting(self) -> None:
        self._in_flight += 1

    def counted(self, number: int, version: int) -> None:
        self._in_flight -= 1
        self._counted += 1
        self.counts["counted"] += 1
        self._expect(number not in self._numbers, f"the number {number} was given twice")
        self._numbers.add(number)
        self._note_version("totals", version)

    def refused_count(self) -> None:
        self._in_flight -= 1

    def found_count(self, number: int) -> None:
        most = self._counted + self._in_flight
        is_exact = self._counted <= number <= most
        self._expect(is_exact, f"the counter is {number}, told {self._counted}, at most {most}")
        self._counted, self._in_flight = number, 0

    # -- transactions over both caches -----------------------------------------------------------

    def asked_txn(self, token: bytes) -> None:
        self._asked_token = token

    def told_txn(self, results: list[dict[str, Any]]) -> None:
        self._token, self._asked_token = self._asked_token or b"", None
        self.counts["transactions"] += 1
        for place, result in enumerate(results):
            self._note_version(CACHES[place % 2], result["version"])

    def refused_txn(self) -> None:
        self._asked_token = None

    def found_txn(self, tokens: list[bytes | None]) -> None:
        whole = {token or b"" for token in tokens}
        self._expect(len(whole) == 1, f"half a transaction: {tokens}")
        possible = {self._token, self._asked_token or self._token}
        self._expect(whole <= possible, f"transaction {whole}, told or asked {possible}")
        self._token, self._asked_token = tokens[0] or b"", None

    # -- versions ------------------------------------------------------------------------------

    def found_version(self, cache: str, version: int) -> None:
        """The cache's own, after a start."""
        highest = self._versions[cache]
        self._expect(version >= highest, f"{cache} went back from {highest} to {version}")

    def _note_version(self, cache: str, version: int) -> None:
        """Answers of several clients cross each other, but nobody is given another's version."""
        self._expect((cache, version) not in self._seen_versions, f"{cache}: {version} twice")
        self._seen_versions.add((cache, version))
        self._versions[cache] = max(self._versions[cache], version)

    def _expect(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            self.violations.append(otherwise)
