"""The cluster: which brokers there are, which of them owns each shard, and how to change that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.api.cluster import BrokerReport, ClusterControl, LogReport, OwnerReport
from penstock.model.access import BROKER_SCOPE
from penstock.model.errors import FailedPrecondition, PenstockError
from penstock.model.names import clean_name
from penstock.server.access import Needs, Open, actor_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, decode_body, truth
from penstock.server.members import Name, StrictBody, optional, required
from penstock.server.routes.endpoint import DONE, Answer, Endpoint, names_in_path

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply


class ClusterMap(msgspec.Struct):
    """`name` is the broker that answers. A shard without a known owner is not in the list. `log` is
    there if it was asked for, or null if NATS does not answer: then `log_error` says why."""

    name: str
    brokers: list[BrokerReport]
    shards: list[OwnerReport]
    cluster: str = ""
    durability: str = ""
    log: LogReport | None = None
    log_error: str = ""


class ClusterQuery(msgspec.Struct):
    log: Annotated[
        bool | None, optional("Ask the NATS servers about the stream that is the log, too.")
    ] = None


class MoveBody(StrictBody):
    to: Annotated[Name, required("The name of the broker that is to own the shard.")] = ""


class DrainBody(StrictBody):
    broker: Annotated[Name, required("The name of the broker that is to own nothing.")] = ""


class MovingShards(msgspec.Struct):
    """The shards whose owner hands them over, and who owns them until then."""

    shards: list[OwnerReport]


_move_decoder = msgspec.json.Decoder(MoveBody)
_drain_decoder = msgspec.json.Decoder(DrainBody)


def describe_cluster(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    wants_log = truth(request.params(), "log")
    forwarder, control = dispatch.forwarder, dispatch.cluster
    if forwarder is None:
        reply.send_json(200, ClusterMap("", [], []))
        return
    owners = forwarder.owners
    found = ClusterMap(owners.name, owners.brokers(), owners.owners(), owners.cluster)
    found.durability = "" if control is None else control.durability

    def described(outcome: LogReport | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            found.log_error = outcome.message
        else:
            found.log = outcome
        reply.send_json(200, found)

    if wants_log and control is not None:
        control.describe_log(described)
    else:
        reply.send_json(200, found)


def move_shard(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    to = clean_name(decode_body(_move_decoder, request.body).to, "to")
    owner = _control(dispatch).move(to)
    _note(dispatch, "cluster.move", to, f"shard {owner.shard} from {owner.owner}")
    reply.send_json(202, MovingShards([owner]))


def drain_broker(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    name = clean_name(decode_body(_drain_decoder, request.body).broker, "broker")
    owner = _control(dispatch).drain(name)
    _note(dispatch, "cluster.drain", name, "" if owner is None else f"shard {owner.shard}")
    reply.send_json(202, MovingShards([] if owner is None else [owner]))


def remove_broker(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    name = clean_name(names_in_path(request)[2], "broker")
    control, actor = _control(dispatch), actor_of(request, reply)

    def removed(outcome: PenstockError | None) -> None:
        if outcome is None and dispatch.is_serving and request.notes.principal is not None:
            with dispatch.engine.audit.acting(actor):
                _note(dispatch, "cluster.remove", name, "")
        reply.settle(outcome)

    control.remove(name, removed)


def _control(dispatch: RequestDispatch) -> ClusterControl:
    if dispatch.cluster is None:
        raise FailedPrecondition("this broker is not part of a cluster")
    return dispatch.cluster


def _note(dispatch: RequestDispatch, action: str, name: str, detail: str) -> None:
    dispatch.engine.audit.note(action, f"broker:{name}", BROKER_SCOPE, "ok", detail)


_MOVES = Answer(
    "The hand-over has begun. The list is empty if the broker owned nothing.",
    MovingShards,
    {"shards": [{"shard": 0, "owner": "b1", "url": "http://10.0.0.1:8080", "epoch": 7}]},
)

ENDPOINTS = (
    Endpoint(
        route="GET /v1/cluster",
        handler=describe_cluster,
        access=Open("clients need it to find the broker that owns their data"),
        tag="Broker",
        summary="The brokers of the cluster, and the owners of its shards",
        text="Any broker answers any request. A client that goes straight to the owner saves the "
        "way through another broker. A broker that is not part of a cluster has an empty name, and "
        "empty lists. lag counts frames of the log, from what the brokers said last, age_ms ago. A "
        "broker that does not announce itself any more is gone until somebody removes it.",
        query=(ClusterQuery,),
        example={"log": "true"},
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
                            "position": 4711,
                            "lag": 0,
                            "age_ms": 412,
                        },
                        {
                            "name": "b2",
                            "url": "http://10.0.0.2:8080",
                            "version": "0.1.0",
                            "state": "standby",
                            "position": 4711,
                            "lag": 0,
                            "age_ms": 37,
                        },
                    ],
                    "shards": [
                        {"shard": 0, "owner": "b1", "url": "http://10.0.0.1:8080", "epoch": 7}
                    ],
                    "cluster": "penstock",
                    "durability": "every answer waits until 2 of 3 NATS servers have stored its "
                    "data and synced it to disk",
                    "log": {
                        "name": "penstock-penstock_shard-0",
                        "first": 1,
                        "last": 4711,
                        "bytes": 1048576,
                        "max_bytes": 10737418240,
                        "servers": [
                            {"name": "n1", "role": "leader", "state": "current", "lag": 0},
                            {"name": "n2", "role": "follower", "state": "current", "lag": 0},
                            {"name": "n3", "role": "follower", "state": "offline", "lag": 3},
                        ],
                    },
                    "log_error": "",
                },
            )
        },
        errors=(400,),
    ),
    Endpoint(
        route="POST /v1/cluster/move",
        handler=move_shard,
        access=Needs("manage", "broker"),
        tag="Broker",
        summary="Let another broker own the shard",
        text="Its owner stops serving, answers what it has accepted, and lets the other broker "
        "take over, which takes some ten milliseconds. Requests wait meanwhile; open streams end "
        "with a reason. The answer comes when this begins: GET /v1/cluster tells when it is done.",
        body=MoveBody,
        example={"to": "b2"},
        answers={202: _MOVES},
        errors=(400, 409, 503),
    ),
    Endpoint(
        route="POST /v1/cluster/drain",
        handler=drain_broker,
        access=Needs("manage", "broker"),
        tag="Broker",
        summary="Let a broker own nothing",
        text="Moves the shard to another broker, if this one owns it. Afterwards it takes a shard "
        "only if no other broker does, until it is started again or a shard is moved to it.",
        body=DrainBody,
        example={"broker": "b1"},
        answers={202: _MOVES},
        errors=(400, 404, 409, 503),
    ),
    Endpoint(
        route="DELETE /v1/cluster/brokers/{broker}",
        handler=remove_broker,
        access=Needs("manage", "broker"),
        tag="Broker",
        summary="Forget a broker that is gone",
        text="Removes its announcement. A broker that is live is refused. If it comes back, it "
        "announces itself again.",
        answers=DONE,
        errors=(400, 404, 409, 503),
    ),
)
