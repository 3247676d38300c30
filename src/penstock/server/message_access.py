"""Access checks on messages: those of the WebSocket and of POST /v1/felix, and on the caches that
a publish or a transaction names besides its own stream or cache.
"""

from __future__ import annotations

from typing import Any

from penstock.api.access import AccessPart
from penstock.model.principals import Principal
from penstock.model.tenancy import Path
from penstock.server.access import HandlerNeeds, check_caches, check_path
from penstock.server.commands import invalidated_caches, path_of, txn_of
from penstock.server.message_actions import MESSAGES
from penstock.server.websocket.messages import (
    PublishBatchBody,
    PublishBody,
    TxnBody,
)

_NEEDS = {each.shape: each.access for each in MESSAGES}


def check_message(access: AccessPart, principal: Principal, message: Any) -> None:
    """Raises PermissionDenied unless the principal may send this message. One that could not be
    read has nothing to check."""
    needs = _NEEDS.get(type(message))
    if not isinstance(needs, HandlerNeeds):
        return
    name = getattr(message, needs.kind)
    path = path_of(message.tenant_id, message.namespace, name, needs.kind)
    check_path(access, principal, needs.permission, needs.kind, path)
    if isinstance(message, PublishBody | PublishBatchBody):
        check_invalidation(access, principal, path, message)
    elif isinstance(message, TxnBody):
        check_transaction(access, principal, path, message)


def check_invalidation(
    access: AccessPart, principal: Principal, path: Path, body: PublishBody | PublishBatchBody
) -> None:
    names = invalidated_caches(body.invalidate)
    check_caches(access, principal, "cache_write", (path[0], path[1]), names)


def check_transaction(access: AccessPart, principal: Principal, path: Path, body: TxnBody) -> None:
    """Needs cache_write on every cache, those of its checks too: conditions belong to writes."""
    command = txn_of(path, body)
    names = [each.path[2] for each in (*command.ops, *command.checks)]
    check_caches(access, principal, "cache_write", (path[0], path[1]), names)
