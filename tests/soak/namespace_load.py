"""Clients of streams, caches and the registry, and what they were told of them.

Durable caches are judged by the ledger of the crash tests. An ephemeral cache is empty after a
restart and its versions go on; events come once, in order, and were sent; what the registry has
acknowledged is there.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from tests.crash.cache_ledger import CACHES, LONG_TTL_MS, Ledger
from tests.soak.process import SoakBroker
from tests.soak.queue_load import Setting
from tests.soak.queue_model import QueueModel
from tests.soak.wire import Answer, Lines, Wire

BASE = "/v1/tenants/default/namespaces/default"
SCOPE = {"tenant_id": "default", "namespace": "default"}
TXN_KEYS = ("t0", "t1", "t2")
EPHEMERAL, STREAM = "brief", "default"
SHORT_TTL_MS = 100


class NamespaceModel:
    def __init__(self, model: QueueModel) -> None:
        self.model = model
        self.ledger = Ledger()
        self.brief_version = 0
        self.tenants: dict[str, bool | None] = {}
        """There, not there, or unknown."""
        self.events = 0


class NamespaceLoad:
    """The clients of one round."""

    def __init__(self, setting: Setting, namespace: NamespaceModel) -> None:
        self._setting = setting
        self._namespace = namespace
        self._model = setting.model
        self._rng = setting.new_rng()
        self._sent_events: dict[str, int] = {}

    def works(self) -> list[Any]:
        name = f"r{self._model.round}"
        return [
            *(self._write_durable(n) for n in range(2)),
            self._count(),
            self._transact(),
            self._use_brief(),
            self._change_registry(),
            self._publish(f"{name}-a"),
            self._publish(f"{name}-b"),
            self._subscribe(),
        ]

    # -- durable caches -------------------------------------------------------------------------

    async def _op(self, wire: Wire, kind: str, **members: Any) -> Answer:
        answer = await wire.ask("POST", "/v1/felix", {"type": kind, **SCOPE, **members})
        is_expected = answer.status in (200, 429, 503)
        self._model.claim(is_expected, f"{kind} {members}: {answer}")
        return answer

    async def _write_durable(self, writer: int) -> None:
        """Puts and deletes, each only if the key is as it was left."""
        ledger, rng = self._namespace.ledger, self._rng
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                key = f"w{writer}-{rng.randrange(12)}"
                at = {"cache": "orders", "key": key, "if_version": ledger.version_of(key)}
                if rng.random() < 0.2:
                    ledger.asked(key, None)
                    answer = await self._op(wire, "cache_delete", **at)
                else:
                    number = next(self._setting.numbers)
                    value = b"%d-%d " % (self._model.round, number) + b"x" * rng.choice([0, 900])
                    ttl = {"ttl_ms": LONG_TTL_MS} if rng.random() < 0.3 else {}
                    ledger.asked(key, value)
                    text = base64.b64encode(value).decode()
                    answer = await self._op(wire, "cache_put", **at, value=text, **ttl)
                if answer.status == 200:
                    ledger.told("orders", key, answer.json["version"])
                else:
                    ledger.refused(key)
                self._model.counts["cache writes"] += 1
                await asyncio.sleep(rng.uniform(0, 0.05))

    async def _count(self) -> None:
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                self._namespace.ledger.counting()
                answer = await self._op(wire, "cache_incr", cache="totals", key="n")
                if answer.status == 200:
                    found = answer.json
                    self._namespace.ledger.counted(found["number"], found["version"])
                else:
                    self._namespace.ledger.refused_count()
                await asyncio.sleep(self._rng.uniform(0, 0.05))

    async def _transact(self) -> None:
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                token = b"%d-%d" % (self._model.round, next(self._setting.numbers))
                text = base64.b64encode(token).decode()
                ops = [
                    {"op": "put", "cache": cache, "key": key, "value": text}
                    for key in TXN_KEYS
                    for cache in CACHES
                ]
                self._namespace.ledger.asked_txn(token)
                answer = await self._op(wire, "cache_txn", cache="orders", ops=ops)
                if answer.status == 200:
                    self._namespace.ledger.told_txn(answer.json["results"])
                else:
                    self._namespace.ledger.refused_txn()
                await asyncio.sleep(self._rng.uniform(0, 0.1))

    # -- an ephemeral cache ---------------------------------------------------------------------

    async def _use_brief(self) -> None:
        """Values are what was put last; one with a short TTL is gone after it."""
        claim, rng = self._model.claim, self._rng
        held: dict[str, str] = {}
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                key = f"k{rng.randrange(8)}"
                found = await wire.ask("GET", f"{BASE}/caches/{EPHEMERAL}/entries/{key}")
                value = found.json["value"] if found.status == 200 else "?"
                claim(value == held.get(key), f"{EPHEMERAL} {key}: {found}, put {held.get(key)}")
                number = next(self._setting.numbers)
                text = base64.b64encode(b"%d" % number).decode()
                is_short = rng.random() < 0.2
                ttl = {"ttl_ms": SHORT_TTL_MS} if is_short else {}
                body = {"value": text} | ttl
                put = await wire.ask("PUT", f"{BASE}/caches/{EPHEMERAL}/entries/{key}", body)
                if put.status != 200:
                    claim(put.status in (429, 503), f"{EPHEMERAL}: {put}")
                    return
                version = put.json["version"]
                before = self._namespace.brief_version
                claim(version > before, f"{EPHEMERAL}: version {version} after {before}")
                self._namespace.brief_version = version
                held[key] = text
                self._model.counts["cache writes"] += 1
                if is_short:
                    await asyncio.sleep(SHORT_TTL_MS * 2 / 1000)
                    del held[key]
                await asyncio.sleep(rng.uniform(0, 0.05))

    # -- the registry ---------------------------------------------------------------------------

    async def _change_registry(self) -> None:
        rng, tenants = self._rng, self._namespace.tenants
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                name = f"tenant-{rng.randrange(4)}"
                was, tenants[name] = tenants.get(name, False), None
                if was or (was is None and rng.random() < 0.5):
                    answer = await wire.ask("DELETE", f"/v1/tenants/{name}?cascade=true")
                    expected = [204] if was else [204, 404]
                    is_there = False
                else:
                    answer = await wire.ask("POST", "/v1/tenants", {"tenant_id": name})
                    expected = [201] if was is False else [200, 201, 409]
                    is_there = True
                if answer.status in expected:
                    tenants[name] = is_there
                    self._model.counts["registry changes"] += 1
                else:
                    self._model.claim(answer.status == 503, f"{name} {was}: {answer}")
                    return
                if is_there and tenants[name]:
                    await self._fill(wire, name)
                await asyncio.sleep(rng.uniform(0, 0.2))

    async def _fill(self, wire: Wire, tenant: str) -> None:
        """Deletion takes all that is inside."""
        await wire.ask("POST", f"/v1/tenants/{tenant}/namespaces", {"namespace": "n"})
        inside = f"/v1/tenants/{tenant}/namespaces/n"
        await wire.ask("POST", f"{inside}/streams", {"name": "s"})
        await wire.ask("POST", f"{inside}/caches", {"name": "c", "durable": True})
        await wire.ask("PUT", f"{inside}/caches/c/entries/k", {"value": "aGVsbG8="})

    # -- streams --------------------------------------------------------------------------------

    async def _publish(self, publisher: str) -> None:
        rng = self._rng
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                first = self._sent_events.get(publisher, 0)
                count = rng.randint(1, 6)
                self._sent_events[publisher] = first + count
                payloads = [
                    base64.b64encode(f"{publisher} {first + n}".encode()).decode()
                    for n in range(count)
                ]
                path = f"{BASE}/streams/{STREAM}/publish_batch"
                answer = await wire.ask("POST", path, {"payloads": payloads})
                self._model.claim(answer.status in (200, 429, 503), f"{path}: {answer}")
                self._model.counts["events published"] += count
                await asyncio.sleep(rng.uniform(0, 0.05))

    async def _subscribe(self) -> None:
        last: dict[str, int] = {}
        async with Wire(self._setting.port) as wire:
            path = f"{BASE}/streams/{STREAM}/subscribe"
            lines = await wire.lines(path, {"heartbeat_ms": 200})
            if not isinstance(lines, Lines):
                self._model.claim(lines.status == 503, f"{path}: {lines}")
                return
            while found := await lines.read():
                for line in found:
                    if line["type"] == "event":
                        self._take_event(line, last)

    def _take_event(self, line: dict[str, Any], last: dict[str, int]) -> None:
        publisher, _, text = base64.b64decode(line["payload"]).decode().partition(" ")
        number, before = int(text), last.get(publisher, -1)
        claim = self._model.claim
        claim(number < self._sent_events.get(publisher, 0), f"nobody published {line}")
        claim(number > before, f"{publisher}: event {number} after {before}")
        last[publisher] = number
        self._model.counts["events received"] += 1


class NamespaceChecks:
    """What is there at rest; `has_restarted` since the last look."""

    def __init__(self, broker: SoakBroker, namespace: NamespaceModel) -> None:
        self._broker = broker
        self._namespace = namespace

    def set_up(self) -> None:
        for name, durable in ((CACHES[0], True), (CACHES[1], True), (EPHEMERAL, False)):
            reply = self._broker.client.post(
                f"{BASE}/caches", json={"name": name, "durable": durable}
            )
            assert reply.status_code == 201, reply.text

    def check(self, *, has_restarted: bool) -> None:
        ledger, client = self._namespace.ledger, self._broker.client
        for key in ledger.known_keys():
            ledger.found(key, *self._entry(CACHES[0], key))
        count, _ = self._entry(CACHES[1], "n")
        ledger.found_count(int(count or b"0"))
        ledger.found_txn([self._entry(cache, key)[0] for key in TXN_KEYS for cache in CACHES])
        for cache in CACHES:
            reply = client.put(f"{BASE}/caches/{cache}/entries/probe", json={"value": ""})
            assert reply.status_code == 200, reply.text
            ledger.found_version(cache, int(reply.json()["version"]) - 1)
        for n in range(8):
            path = f"{BASE}/caches/{EPHEMERAL}/entries/k{n}"
            if has_restarted:
                value = client.get(path).json()["value"]
                self._namespace.model.claim(value is None, f"{path} outlived a restart")
            client.delete(path)
        self._check_registry()
        self._namespace.model.violations += ledger.violations
        ledger.violations.clear()

    def _check_registry(self) -> None:
        reply = self._broker.client.get("/v1/tenants")
        assert reply.status_code == 200, reply.text
        there = set(json.dumps(reply.json()).split('"'))
        for name, is_there in self._namespace.tenants.items():
            if is_there is None:
                self._namespace.tenants[name] = name in there
            else:
                told = f"{name} was {'made' if is_there else 'deleted'}: {reply.text}"
                self._namespace.model.claim((name in there) == is_there, told)

    def _entry(self, cache: str, key: str) -> tuple[bytes | None, int]:
        reply = self._broker.client.get(f"{BASE}/caches/{cache}/entries/{key}")
        assert reply.status_code == 200, reply.text
        found = reply.json()
        value = found["value"]
        return None if value is None else base64.b64decode(value), int(found["version"])
