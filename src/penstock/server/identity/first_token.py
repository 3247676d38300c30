"""The first admin token: made once, so that somebody can create the others.

Invariant: it is made only while no other admin could sign in. Its secret goes to the caller, who
shows it on stdout, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.api.audit import AuditPart
from penstock.api.tokens import TokensPart
from penstock.model.audit import BROKER_ACTOR
from penstock.model.errors import PenstockError
from penstock.model.tokens import Token
from penstock.server.identity.credentials import new_secret, new_token_id, wall_ms
from penstock.server.logs import hide_secret

FIRST_PRINCIPAL = "admin"

_log = logging.getLogger("penstock.server")


async def make_first_token(tokens: TokensPart, audit: AuditPart) -> str:
    """Returns the text of the token, or nothing if there is an admin token already."""
    loop = asyncio.get_running_loop()
    listed: asyncio.Future[list[Token] | PenstockError] = loop.create_future()
    tokens.list(listed.set_result)
    found = await listed
    if isinstance(found, PenstockError) or any(map(_is_admin, found)):
        return ""
    token_id = new_token_id()
    secret = new_secret(token_id)
    hide_secret(secret.text)
    created: asyncio.Future[Token | PenstockError] = loop.create_future()
    wanted = Token(token_id, FIRST_PRINCIPAL, None, None, (), True, 0, 0, secret.digest)
    with audit.acting(BROKER_ACTOR):
        tokens.create(wanted, created.set_result)
    outcome = await created
    if isinstance(outcome, PenstockError):
        _log.error("the first admin token could not be created: %s", outcome.message)
        return ""
    return secret.text


def _is_admin(token: Token) -> bool:
    return token.admin and token.tenant_id is None and not token.is_expired(wall_ms())
