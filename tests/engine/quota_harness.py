"""Tenants with quotas, on a clock that the tests drive."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.api.quotas import QuotaReport
from penstock.model.caching import Put
from penstock.model.errors import PenstockError, ResourceExhausted
from penstock.model.quotas import Quota
from penstock.model.scopes import Scope, full_name
from penstock.model.streams import Publish
from penstock.model.tenancy import CacheConfig, Entry, StreamConfig
from tests.engine.harness import Broker
from tests.storage.faulty_vfs import FaultyVfs

PROD: Scope = ("acme", "prod")
OTHER: Scope = ("globex", "prod")


class Tenants(Broker):
    """A broker with two tenants that have the same topic, stream and cache."""

    def __init__(self, vfs: FaultyVfs | None = None) -> None:
        super().__init__(vfs)
        for tenant, namespace in (PROD, ("acme", "test"), OTHER):
            place: dict[str, Any] = {"tenant_id": tenant, "namespace": namespace}
            self.create(Entry(kind="tenant", tenant_id=tenant))
            self.create(Entry(kind="namespace", **place))
            self.create(Entry(kind="stream", **place, name="s", stream=StreamConfig()))
            self.create(Entry(kind="cache", **place, name="c", cache=CacheConfig()))
            self.topic(full_name((tenant, namespace), "t"))

    def create(self, entry: Entry) -> None:
        self.must(self.engine.registry.create, entry)

    def limit(self, scope: Scope, **limits: int) -> None:
        def change(done: Any) -> None:
            self.engine.registry.change((*scope, ""), done, quota=Quota(**limits))

        self.must(change)

    def send(self, scope: Scope, value: str = "x") -> str:
        """Produces. Returns the name of the quota that refused it, or nothing."""
        return quota_of(self.try_produce(full_name(scope, "t"), value))

    def publish(self, scope: Scope, *payloads: bytes) -> str:
        command = Publish(path=(*scope, "s"), payloads=list(payloads or (b"x",)))
        return quota_of(self.call(self.engine.streams.publish, command))

    def add_durable(self, scope: Scope, delivery: str = "at_least_once", name: str = "d") -> None:
        """Adds a durable stream, which needs a disk."""
        config = StreamConfig(delivery=delivery, durable=True)  # type: ignore[arg-type]
        entry = Entry(kind="stream", tenant_id=scope[0], namespace=scope[1], name=name)
        self.create(msgspec.structs.replace(entry, stream=config))

    def publish_kept(self, scope: Scope, *payloads: bytes, **numbers: Any) -> Any:
        """Publishes to the durable stream. Returns the outcome."""
        command = Publish(path=(*scope, "d"), payloads=list(payloads or (b"x",)), **numbers)
        return self.call(self.engine.streams.publish, command)

    def put(self, scope: Scope, key: str, value: bytes) -> str:  # type: ignore[override]
        return quota_of(self.call(self.engine.caches.put, Put((*scope, "c"), key, value)))

    def report(self, scope: Scope) -> QuotaReport:
        found: QuotaReport = self.must(self.engine.quotas.report, scope)
        return found


def quota_of(outcome: Any) -> str:
    if isinstance(outcome, ResourceExhausted):
        assert outcome.reason == "quota"
        assert outcome.retry_after_ms > 0
        return outcome.limit
    assert not isinstance(outcome, PenstockError), outcome
    return ""
