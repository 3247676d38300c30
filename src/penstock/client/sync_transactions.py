# Generated from aio_transactions.py by scripts/generate_sync_client.py: edit that, run this.
"""Transactions for blocking code: collects operations and commits all of them together."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.client.transactions import TransactionOperations, TransactionResult

if TYPE_CHECKING:
    from penstock.client.sync import Client


class Transaction(TransactionOperations):
    """A transaction that is committed at the end of a `with`, unless the block raises:

    tx.produce("invoices", "17 EUR")
    tx.ack(delivery)

    After that, `results` has a result for each operation, in order. If the answer was lost
    (Unavailable), it is not known whether the transaction happened. `commit` may then be called
    again: the broker does it once, and gives the same results.

    `ack` and `nack` also take events of a named subscription of a stream.
    """

    def __init__(self, client: Client, transaction_id: str = "") -> None:
        super().__init__(transaction_id, client.path_scope())
        self._client = client

    def commit(self) -> list[TransactionResult]:
        """Sends the operations and returns their results. Raises the error of the first that the
        broker refuses, with its index as `operation`; then nothing was done. A transaction without
        operations sends nothing."""
        if len(self) and not self.is_committed:
            self.results = self._client.send(self.call())
        self.is_committed = True
        return self.results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.commit()
