"""The internal path from which other brokers of the cluster copy sealed files.

It is not in the documents: clients have no use for it. With access control it takes the static
token only, which all brokers of a cluster share; no rule can give anybody else the right to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.api.cluster import COPY_PATH
from penstock.model.errors import NotFound, PenstockError, PermissionDenied
from penstock.model.principals import STATIC_PRINCIPAL
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.requests import Request, whole_number

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

ROUTE = COPY_PATH.encode()


def read_copy(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    """Sends the manifest or, with `file`, a part of a file that it names."""
    principal = request.notes.principal
    if principal is not None and principal != STATIC_PRINCIPAL:
        raise PermissionDenied("only brokers of the cluster, with its static token, copy files")
    source = dispatch.copies
    if source is None:
        raise NotFound("this broker is not part of a cluster")

    def done(outcome: bytes | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            reply.send_error(outcome)
        else:
            reply.send(200, outcome, b"content-type: application/octet-stream\r\n")

    params = request.params()
    name = params.get("file", "")
    if name:
        offset, length = whole_number(params, "offset"), whole_number(params, "length")
        source.read(name, offset or 0, length or 0, done)
    else:
        source.manifest(done)
