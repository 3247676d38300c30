"""The addresses of NATS servers and the credentials for them, read from one string.

`nats://a,b:4223,c`, `nats://user:password@a,b`, `nats://token@a,b`, `tls://a,b`. Credentials that
one address has count for those without any. They are never part of a text that this module makes,
not of an error either.
"""

from __future__ import annotations

from urllib.parse import unquote

import msgspec

from penstock.cluster.jetstream.errors import NatsAddressInvalid

PORT = 4222
SCHEMES = ("nats", "tls")
_FORM = "expected nats://HOST[:PORT][,HOST[:PORT]...], with tls:// for TLS"


class NatsCredentials(msgspec.Struct, frozen=True):
    """A user with a password, or a token. Does not show itself."""

    user: str = ""
    password: str = ""
    token: str = ""

    def __repr__(self) -> str:
        return "NatsCredentials(hidden)"

    def options(self) -> dict[str, object]:
        """Returns the members of CONNECT."""
        if self.token:
            return {"auth_token": self.token}
        return {"user": self.user, "pass": self.password} if self.user else {}


class NatsAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    needs_tls: bool
    credentials: NatsCredentials

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def read_addresses(text: str) -> tuple[NatsAddress, ...]:
    """Raises NatsAddressInvalid, which names the place of the fault and not what is there."""
    found: list[NatsAddress] = []
    scheme, credentials = "", NatsCredentials()
    for number, part in enumerate(text.strip().split(","), start=1):
        head, separator, rest = part.strip().partition("://")
        if separator:
            scheme = head.lower()
        else:
            rest = head
        if scheme not in SCHEMES:
            raise NatsAddressInvalid(f"address {number} of the NATS servers: {_FORM}")
        login, separator, place = rest.rpartition("@")
        if separator:
            credentials = _read_credentials(login)
        host, port = _read_place(place.rstrip("/"), number)
        found.append(NatsAddress(host, port, scheme == "tls", credentials))
    first = next((each.credentials for each in found if each.credentials.options()), credentials)
    return tuple(
        each if each.credentials.options() else msgspec.structs.replace(each, credentials=first)
        for each in found
    )


def _read_credentials(login: str) -> NatsCredentials:
    user, separator, password = login.partition(":")
    if separator:
        return NatsCredentials(user=unquote(user), password=unquote(password))
    return NatsCredentials(token=unquote(user))


def _read_place(place: str, number: int) -> tuple[str, int]:
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        host = host if bracket else ""
        separator, port = rest[:1], rest[1:]
    else:
        host, separator, port = place.partition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not host or any(each in host for each in "/?# \t") or (separator not in ("", ":")):
        raise NatsAddressInvalid(f"address {number} of the NATS servers has no valid host: {_FORM}")
    if separator and not is_port:
        raise NatsAddressInvalid(f"address {number} of the NATS servers has no valid port: {_FORM}")
    return host, int(port) if separator else PORT
