"""The map of the cluster: which brokers there are, and which of them owns each shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.api.cluster import BrokerReport, OwnerReport
from penstock.server.access import Open
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request
from penstock.server.routes.endpoint import Answer, Endpoint

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


class ClusterMap(msgspec.Struct):
    """`name` is the broker that answers. A shard without a known owner is not in the list."""

    name: str
    brokers: list[BrokerReport]
    shards: list[OwnerReport]


def describe_cluster(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    forwarder = dispatch.forwarder
    if forwarder is None:
        reply.send_json(200, ClusterMap("", [], []))
        return
    owners = forwarder.owners
    reply.send_json(200, ClusterMap(owners.name, owners.brokers(), owners.owners()))


ENDPOINTS = (
    Endpoint(
        route="GET /v1/cluster",
        handler=describe_cluster,
        access=Open("clients need it to find the broker that owns their data"),
        tag="Broker",
        summary="The brokers of the cluster, and the owners of its shards",
        text="Any broker answers any request. A client that goes straight to the owner saves the "
        "way through another broker. A broker that is not part of a cluster has an empty name, and "
        "empty lists.",
        answers={
            200: Answer(
                "The cluster, as this broker knows it now.",
                ClusterMap,
                {
                    "name": "b2",
                    "brokers": [
                        {
                            "name": "b1",
                            "url": "http://10.0.0.1:8080",
                            "version": "0.1.0",
                            "state": "owner",
                        },
                        {
                            "name": "b2",
                            "url": "http://10.0.0.2:8080",
                            "version": "0.1.0",
                            "state": "standby",
                        },
                    ],
                    "shards": [
                        {"shard": 0, "owner": "b1", "url": "http://10.0.0.1:8080", "epoch": 7}
                    ],
                },
            )
        },
    ),
)
