"""The registry as a whole: its position, and the snapshot and changes that followers ask for."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.model.tenancy import Changes, Snapshot
from penstock.server.access import Needs
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import required_index, whole_number
from penstock.server.members import Count, limits, optional, required
from penstock.server.registry.exchange import SHOWN_BYTES, RegistryRequest, reading
from penstock.server.registry.mirror import RemoteChange, RemoteChanges, RemoteSnapshot
from penstock.server.routes.endpoint import Answer, Endpoint

_Epoch = Annotated[int, limits(minimum=-(10**18), maximum=10**18)]


class ChangesQuery(msgspec.Struct):
    since: Annotated[Count | None, required("The revision that the client has.")] = None
    epoch: Annotated[
        _Epoch | None, optional("The epoch of the registry that the revision belongs to.")
    ] = None


class RegistryAnswer(msgspec.Struct, kw_only=True):
    """The members after `revision` are sent by a follower only."""

    role: Literal["own", "follower"]
    instance: str
    epoch: int
    revision: int
    control_plane: str | UnsetType = UNSET
    connected: bool | UnsetType = UNSET
    last_sync_ms: int | UnsetType | None = UNSET
    last_error: str | UnsetType | None = UNSET


@reading
def status(exchange: RegistryRequest) -> None:
    def found(position: tuple[int, int]) -> None:
        epoch, revision = position
        follower = exchange.dispatch.follower
        answer = RegistryAnswer(
            role="own" if follower is None else "follower",
            instance=exchange.dispatch.instance,
            epoch=epoch,
            revision=revision,
        )
        if follower is not None:
            answer.control_plane, answer.connected = follower.url, follower.connected
            answer.last_sync_ms, answer.last_error = follower.last_sync_ms, follower.last_error
        exchange.send(200, answer)

    exchange.registry.position(exchange.then(found))


@reading
def snapshot(exchange: RegistryRequest) -> None:
    def taken(found: Snapshot) -> None:
        exchange.reply.when_room(SHOWN_BYTES * len(found.entries), lambda: send(found))

    def send(found: Snapshot) -> None:
        body = RemoteSnapshot(
            instance=exchange.dispatch.instance,
            follows=_follows(exchange.dispatch),
            epoch=found.epoch,
            revision=found.revision,
            entries=found.entries,
        )
        exchange.reply.send_json(200, body)

    exchange.registry.snapshot(exchange.then(taken))


@reading
def changes(exchange: RegistryRequest) -> None:
    params = exchange.request.params()
    since = required_index(whole_number(params, "since"), "since")
    epoch = whole_number(params, "epoch")

    def found(news: Changes) -> None:
        exchange.reply.when_room(SHOWN_BYTES * len(news.changes), lambda: send(news))

    def send(news: Changes) -> None:
        body = RemoteChanges(
            instance=exchange.dispatch.instance,
            follows=_follows(exchange.dispatch),
            epoch=news.epoch,
            revision=news.revision,
            changes=[
                RemoteChange(change.entry.revision, change.entry, change.deleted)
                for change in news.changes
            ],
        )
        exchange.reply.send_json(200, body)

    exchange.registry.changes(since, epoch, exchange.then(found))


def _follows(dispatch: RequestDispatch) -> list[str]:
    return [] if dispatch.follower is None else dispatch.follower.follows


_AT = {"epoch": 1_767_225_600_000, "revision": 5}
_WHO = {"instance": "c5023744d4f661f0", "follows": []}
_TENANT = {
    "kind": "tenant",
    "tenant_id": "acme",
    "id": 5,
    "revision": 5,
    "created_ms": 1_767_225_600_000,
}

ENDPOINTS = (
    Endpoint(
        route="GET /v1/registry",
        handler=status,
        access=Needs("registry", "broker"),
        tag="Registry",
        summary="Role and revision of the registry",
        text="A follower also names its control plane, and says whether it is connected.",
        answers={
            200: Answer(
                "Its role and revision.",
                RegistryAnswer,
                {"role": "own", "instance": _WHO["instance"], **_AT},
            )
        },
        errors=(503,),
    ),
    Endpoint(
        route="GET /v1/registry/snapshot",
        handler=snapshot,
        access=Needs("registry", "broker"),
        tag="Registry",
        summary="All entries at one revision",
        answers={
            200: Answer(
                "The entries, parents before their children.",
                RemoteSnapshot,
                {**_WHO, **_AT, "entries": [_TENANT]},
            )
        },
        errors=(503,),
    ),
    Endpoint(
        route="GET /v1/registry/changes",
        handler=changes,
        access=Needs("registry", "broker"),
        tag="Registry",
        summary="Changes after a revision",
        text="410 if the changes are no longer kept (10,000 are, and none across a restart "
        "from a snapshot) or the epoch is another: take a snapshot. 416 if the revision is in "
        "the future.",
        query=(ChangesQuery,),
        example={"since": 4},
        answers={
            200: Answer(
                "The changes, in order.",
                RemoteChanges,
                {
                    **_WHO,
                    **_AT,
                    "changes": [{"revision": 5, "entry": _TENANT, "deleted": False}],
                },
            )
        },
        errors=(400, 410, 416, 503),
    ),
)
