"""From a decoded body or query to a command."""

from __future__ import annotations

from penstock.api.effects import EffectCommand
from penstock.model.errors import InvalidArgument
from penstock.model.names import clean_name
from penstock.server.envelopes import check_length
from penstock.server.wire import EffectBody


def effect_of(body: EffectBody) -> EffectCommand:
    check_length(body.tenant_id, "tenant_id")
    check_length(body.key, "key")
    if not body.key:
        raise InvalidArgument("key is required")
    return EffectCommand(
        body.tenant_id or "",
        clean_name(body.topic, "topic"),
        clean_name(body.group, "group"),
        body.key,
        clean_name(body.owner, "owner"),
    )
