"""The registry as a whole: where it stands, and what those who follow it ask for."""

from __future__ import annotations

from typing import Any

from penstock.model.tenancy import Changes, Snapshot
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import required_index, whole_number
from penstock.server.registry.mirror import RemoteChange, RemoteChanges, RemoteSnapshot
from penstock.server.registry_exchange import SHOWN_BYTES, Exchange, looking


@looking
def status(exchange: Exchange) -> None:
    """Whose registry it is, where it stands, and how following goes."""
    follower = exchange.hub.follower
    shown: dict[str, Any] = {
        "role": "own" if follower is None else "follower",
        "instance": exchange.hub.instance,
    }
    if follower is not None:
        shown |= {
            "control_plane": follower.url,
            "connected": follower.connected,
            "last_sync_ms": follower.last_sync_ms,
            "last_error": follower.last_error,
        }

    def found(position: tuple[int, int]) -> None:
        epoch, revision = position
        exchange.send(200, shown | {"epoch": epoch, "revision": revision})

    exchange.registry.position(exchange.then(found))


@looking
def snapshot(exchange: Exchange) -> None:
    def taken(found: Snapshot) -> None:
        exchange.reply.when_room(SHOWN_BYTES * len(found.entries), lambda: send(found))

    def send(found: Snapshot) -> None:
        body = RemoteSnapshot(
            instance=exchange.hub.instance,
            follows=_follows(exchange.hub),
            epoch=found.epoch,
            revision=found.revision,
            entries=found.entries,
        )
        exchange.reply.send_json(200, body)

    exchange.registry.snapshot(exchange.then(taken))


@looking
def changes(exchange: Exchange) -> None:
    params = exchange.request.params()
    since = required_index(whole_number(params, "since"), "since")
    epoch = whole_number(params, "epoch")

    def found(news: Changes) -> None:
        exchange.reply.when_room(SHOWN_BYTES * len(news.changes), lambda: send(news))

    def send(news: Changes) -> None:
        body = RemoteChanges(
            instance=exchange.hub.instance,
            follows=_follows(exchange.hub),
            epoch=news.epoch,
            revision=news.revision,
            changes=[
                RemoteChange(change.entry.revision, change.entry, change.deleted)
                for change in news.changes
            ],
        )
        exchange.reply.send_json(200, body)

    exchange.registry.changes(since, epoch, exchange.then(found))


def _follows(hub: RequestDispatch) -> list[str]:
    return [] if hub.follower is None else hub.follower.follows
