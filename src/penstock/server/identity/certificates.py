"""Client certificates: the principal that one names.

The TLS layer has verified the certificate before anything here sees it. Must not know files.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from penstock.model.errors import InvalidArgument
from penstock.model.principals import Principal, clean_principal
from penstock.server.identity.credentials import Credential


def certificate_of(transport: asyncio.Transport) -> Credential | None:
    """Returns what the client's certificate proves; None without one, or if it names nobody."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return None
    try:
        name = clean_principal(_name_in(certificate))
    except InvalidArgument:
        return None
    expires_ms = int(ssl.cert_time_to_seconds(certificate["notAfter"])) * 1000
    return Credential(Principal(name, expires_ms=expires_ms), "certificate")


def _name_in(certificate: dict[str, Any]) -> str:
    """Returns the common name of the subject, or else its first DNS name."""
    for attributes in certificate.get("subject", ()):
        for kind, value in attributes:
            if kind == "commonName" and value.strip():
                return str(value)
    names = (value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")
    return next(names, "")
