"""TLS to a broker: who is trusted, and which of its failures waiting cannot mend.

Trusted is what the system trusts or, where they are set, what SSL_CERT_FILE and SSL_CERT_DIR name;
so it is in every client and in the Spark connector. Must not know how requests are sent.
"""

from __future__ import annotations

import ssl

from penstock.model.errors import InvalidArgument

_UNKNOWN_ISSUER = frozenset({18, 19, 20, 21})
"""OpenSSL's codes for certificates that nobody who is trusted has signed."""

_NO_TLS = ("wrong version number", "record layer failure")
"""What OpenSSL says of an answer that is not TLS, before 3.2 and since."""


def context_for(scheme: str) -> ssl.SSLContext:
    """Reading what the system trusts takes tens of milliseconds, so plain HTTP goes without: its
    context trusts nobody."""
    if scheme == "https":
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def refusal_of(url: str, error: BaseException) -> InvalidArgument | None:
    """What TLS has against the address; None: nothing, or it may be mended by trying again."""
    cause = _ssl_error_in(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        cure = ""
        if cause.verify_code in _UNKNOWN_ISSUER:
            cure = "; SSL_CERT_FILE may name the authorities to trust"
        return InvalidArgument(
            f"the certificate of {url} does not hold: {cause.verify_message}{cure}"
        )
    if cause is not None and any(text in str(cause).lower() for text in _NO_TLS):
        return InvalidArgument(f"{url} does not speak TLS; is it {with_scheme('http', url)}?")
    return None


def with_scheme(scheme: str, url: str) -> str:
    return scheme + url[url.index(":") :]


def _ssl_error_in(error: BaseException | None) -> ssl.SSLError | None:
    """The error, or what caused it."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
