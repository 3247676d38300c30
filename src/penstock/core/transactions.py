"""Transactions that are remembered by their id, each with its answer.

Invariant: an id is remembered from the record of its transaction, so it is exactly as durable as
the transaction. Every id is in the order of committing, which is the order of expiry too while the
TTL stays the same. When expired ids are dropped does not matter, since `get` compares the time.
Each operation is O(1) amortised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from penstock.model.records import TransactionCommitted
from penstock.model.scopes import Scope, split_name


class RememberedTransaction(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Also its image in a snapshot."""

    transaction_id: str
    expires: int
    fingerprint: bytes
    answer: bytes


class CommittedTransactions:
    """`answer_bytes` is the size of all remembered answers."""

    __slots__ = ("_by_id", "_order", "answer_bytes")

    def __init__(self) -> None:
        self._by_id: dict[str, RememberedTransaction] = {}
        self._order: deque[RememberedTransaction] = deque()
        self.answer_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, transaction_id: str, now_ms: int) -> RememberedTransaction | None:
        found = self._by_id.get(transaction_id)
        return found if found is not None and found.expires > now_ms else None

    def commit(self, record: TransactionCommitted, expires: int) -> None:
        self.forget_expired(record.ts)
        self._add(
            RememberedTransaction(record.transaction_id, expires, record.fingerprint, record.answer)
        )

    def forget_expired(self, now_ms: int) -> None:
        order = self._order
        while order and order[0].expires <= now_ms:
            self._forget(order.popleft())

    def forget_within(self, scope: Scope) -> None:
        """Forgets the transactions of a deleted namespace."""
        for each in list(self._by_id.values()):
            if split_name(each.transaction_id)[0] == scope:
                self._forget(each)

    def items(self) -> list[RememberedTransaction]:
        return [each for each in self._order if self._by_id.get(each.transaction_id) is each]

    def restore(self, items: Iterable[RememberedTransaction]) -> None:
        for each in items:
            self._add(each)

    def _add(self, new: RememberedTransaction) -> None:
        old = self._by_id.get(new.transaction_id)
        if old is not None:
            # It has expired, but entries that expire later are before it: the TTL was longer.
            self._forget(old)
        self._by_id[new.transaction_id] = new
        self._order.append(new)
        self.answer_bytes += len(new.answer)

    def _forget(self, old: RememberedTransaction) -> None:
        if self._by_id.get(old.transaction_id) is old:
            del self._by_id[old.transaction_id]
            self.answer_bytes -= len(old.answer)
