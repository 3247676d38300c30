"""A request, and functions that read its parameters from the body or the query."""

from __future__ import annotations

import re
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from penstock.model.audit import AUDIT_TOPIC
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_POSITION
from penstock.model.names import full_name_in
from penstock.model.options import check_number
from penstock.model.principals import Principal
from penstock.model.scopes import DEFAULT_SCOPE, Scope, plain_name
from penstock.server.identity.credentials import Credential

T = TypeVar("T")

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")


class Notes(msgspec.Struct, frozen=True):
    """The parts of a request's headers that its handler needs.

    `wants_events`: a stream is to be sent as server-sent events. `wants_html`: a browser shows the
    answer as a page. `if_match` and `if_none_match` are the headers of these names, None without.
    `is_preflight`: a browser asks, before it sends the request of a page, whether it may.
    `cors_head` are header lines for the answer that let a page of an allowed origin read it.
    `host` is the header of this name. `token_refusal` says why the token of the request, or the
    lack of one, would be refused where a token is needed. `scope` is the tenant and namespace that
    plain names in the request belong to; `tenant` and `namespace` are None if neither a header nor
    the sender names them. `principal` is the verified sender; None means that the broker does not
    ask who sends, UNVERIFIED that another broker has to. `credential` is what proved it.
    `last_event_id` is the header of this name, None without. `sender` is whom the connection counts
    for: the tenant of the credential or, if the broker does not ask who sends, of a header, and the
    namespace, empty if none is named. `via` is the broker that says it forwarded the request, empty
    if none does. `forwarded_head` are the header lines that go with the request to another broker,
    if this one forwards requests.
    """

    wants_events: bool = False
    wants_html: bool = False
    if_match: bytes | None = None
    if_none_match: bytes | None = None
    is_preflight: bool = False
    cors_head: bytes = b""
    host: bytes = b""
    token_refusal: PenstockError | None = None
    scope: Scope = DEFAULT_SCOPE
    tenant: str | None = None
    namespace: str | None = None
    principal: Principal | None = None
    credential: Credential | None = None
    last_event_id: bytes | None = None
    sender: Scope | None = None
    via: bytes = b""
    forwarded_head: bytes = b""


NO_NOTES = Notes()


class Request:
    __slots__ = ("body", "method", "notes", "path", "query")

    def __init__(
        self,
        method: bytes,
        path: bytes,
        query: bytes,
        notes: Notes = NO_NOTES,
        body: bytes = b"",
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.notes = notes
        self.body = body

    def with_body(self, body: bytes) -> Request:
        """Returns a copy with another body."""
        return Request(self.method, self.path, self.query, self.notes, body)

    def full_name(self, raw: str | None, what: str = "topic") -> str:
        """Returns the full name of a topic or producer that the request names plainly. Raises
        InvalidArgument if that is no name. Every handler uses this for the names it passes on."""
        full = full_name_in(self.notes.scope, raw, what)
        # There is one audit log, which every namespace knows by the same name.
        is_audit = what == "topic" and plain_name(full) == AUDIT_TOPIC
        return AUDIT_TOPIC if is_audit else full

    def params(self) -> dict[str, str]:
        """Returns the query. The first value of a repeated parameter counts."""
        params: dict[str, str] = {}
        for name, value in self._pairs():
            params.setdefault(name, value)
        return params

    def every(self, name: str) -> list[str]:
        """Returns all values of a parameter that may be repeated."""
        return [value for each, value in self._pairs() if each == name]

    def _pairs(self) -> list[tuple[str, str]]:
        try:
            return parse_qsl(self.query.decode("ascii"), keep_blank_values=True, errors="strict")
        except ValueError as error:
            raise InvalidArgument("the query is not percent-encoded UTF-8") from error


def origin_form(target: bytes) -> bytes:
    """Returns the path and query of a request target, which may be a whole URL."""
    if target[:1] == b"/" or b"://" not in target:
        return target
    _, _, rest = target.partition(b"://")
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else b"/"


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decodes a JSON body of one known shape; raises InvalidArgument for anything else."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise wrong_json(error) from error


def wrong_json(error: Exception) -> InvalidArgument:
    return InvalidArgument(f"invalid JSON body: {error}")


def whole_number(params: dict[str, str], name: str) -> int | None:
    """Reads a query parameter as an integer; None when it is absent or blank."""
    text = params.get(name, "").strip()
    if not text:
        return None
    if not _WHOLE.fullmatch(text):
        raise InvalidArgument(f"{name} must be a whole number")
    return int(text)


def not_negative(params: dict[str, str], name: str) -> int | None:
    """Reads a query parameter as an offset, a position or a time in ms; None when it is absent."""
    number = whole_number(params, name)
    return None if number is None else check_number(name, number, 0, MAX_POSITION)


def check_raw_only(params: dict[str, str], names: tuple[str, ...]) -> None:
    """Refuses parameters that only a request with raw=true may have in its query. Beside a JSON
    body they would be ignored, and a condition must not be ignored."""
    given = [name for name in names if name in params]
    if given:
        raise InvalidArgument(
            f"in the query, {', '.join(given)} must come with raw=true; without it, the JSON body "
            "has these members"
        )


def truth(params: dict[str, str], name: str) -> bool:
    """Reads a query parameter as true or false; false when it is absent or blank."""
    text = params.get(name, "").strip().lower()
    if text in ("true", "1"):
        return True
    if text in ("", "false", "0"):
        return False
    raise InvalidArgument(f"{name} must be true or false")


def truth_if_given(params: dict[str, str], name: str) -> bool | None:
    """Reads a query parameter as true or false; None when it is absent or blank."""
    return truth(params, name) if params.get(name, "").strip() else None


def required_index(value: int | None, name: str) -> int:
    """Returns a partition or an offset, if it is given and not negative."""
    if value is None:
        raise InvalidArgument(f"{name} is required")
    return check_number(name, value)


def path_name(part: bytes) -> str:
    """Decodes a percent-encoded segment of a path."""
    try:
        return unquote(part.decode("ascii"), errors="strict")
    except ValueError as error:
        raise InvalidArgument("the path is not percent-encoded UTF-8") from error
