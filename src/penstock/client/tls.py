"""TLS to a broker: which certificates are trusted, and which failures are final.

Every client and the Spark connector trust the system's authorities or, where they are set, those in
SSL_CERT_FILE and SSL_CERT_DIR. Must not know how requests are sent.
"""

from __future__ import annotations

import ssl

from penstock.model.errors import InvalidArgument

_UNKNOWN_ISSUER = frozenset({18, 19, 20, 21})
"""OpenSSL's codes for certificates that no trusted authority has signed."""

_NO_TLS = ("wrong version number", "record layer failure")
"""OpenSSL's words for an answer that is not TLS, before 3.2 and since."""


def context_for(scheme: str) -> ssl.SSLContext:
    """Returns the TLS context for a scheme. Loading the system's authorities takes tens of
    milliseconds, so the context for plain HTTP has none."""
    if scheme == "https":
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def refusal_of(url: str, error: BaseException) -> InvalidArgument | None:
    """Returns the error if TLS cannot work with this address; None if trying again may help."""
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
    """Returns the TLS error among an error and its causes."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
