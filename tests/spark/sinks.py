"""What the sink's tests share: rows to write, and what a broker holds afterwards."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import httpx
import pyarrow as pa

from tests.broker_process import BrokerProcess


def stored(broker: BrokerProcess, topic: str) -> list[dict[str, Any]]:
    """Every row of the topic, partition by partition, in order; columns that are null left out."""
    reply = broker.client.get(f"/v1/topics/{topic}")
    assert reply.status_code == 200, reply.text
    rows: list[dict[str, Any]] = []
    for partition in range(len(reply.json()["partitions"])):
        table = _records(broker.client, topic, partition)
        for row in table.to_pylist():
            rows.append({k: v for k, v in row.items() if v is not None} | {"partition": partition})
    return rows


def values(broker: BrokerProcess, topic: str) -> list[str]:
    return [row["value"] for row in stored(broker, topic)]


def cached(broker: BrokerProcess, cache: str, key: str) -> str | None:
    tenant, namespace, name = cache.split("/")
    path = f"/v1/tenants/{tenant}/namespaces/{namespace}/caches/{name}/entries/{quote(key, '')}"
    reply = broker.client.get(path)
    assert reply.status_code == 200, reply.text
    value = reply.json()["value"]
    return None if value is None else b64decode(value).decode()


def numbered(numbers: Iterable[int], size: int = 0) -> list[str]:
    """Values that tell a row from every other."""
    return [f"value {n} ".ljust(size, ".") for n in numbers]


def _records(client: httpx.Client, topic: str, partition: int) -> pa.Table:
    reply = client.get(f"/v1/topics/{topic}/partitions/{partition}/records")
    assert reply.status_code == 200, reply.text
    return pa.ipc.open_stream(reply.content).read_all()
