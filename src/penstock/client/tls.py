"""TLS to a broker: which certificates are trusted and shown, and which failures are final.

Every client and the Spark connector trust the system's authorities or, where they are set, those in
SSL_CERT_FILE and SSL_CERT_DIR. Must not know how requests are sent.
"""

from __future__ import annotations

import os
import ssl

from penstock.model.errors import InvalidArgument

_UNKNOWN_ISSUER = frozenset({18, 19, 20, 21})
"""OpenSSL's codes for certificates that no trusted authority has signed."""

_NO_TLS = ("wrong version number", "record layer failure")
"""OpenSSL's words for an answer that is not TLS, before 3.2 and since."""


_NO_CERTIFICATE = ("certificate required", "bad certificate", "unknown ca", "certificate unknown")
"""OpenSSL's words for a broker that does not accept the client's certificate, or lack of one."""


def context_for(
    scheme: str, client_cert: str | None = None, client_key: str | None = None
) -> ssl.SSLContext:
    """Returns the TLS context for a scheme, with the client's certificate if there is one: the
    arguments, else PENSTOCK_CLIENT_CERT and PENSTOCK_CLIENT_KEY. Loading the system's authorities
    takes tens of milliseconds, so the context for plain HTTP has none."""
    if scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context = ssl.create_default_context()
    if client_cert is None and client_key is None:
        client_cert = os.environ.get("PENSTOCK_CLIENT_CERT")
        client_key = os.environ.get("PENSTOCK_CLIENT_KEY")
    if client_cert:
        try:
            context.load_cert_chain(client_cert, client_key or None, password=_no_password)
        except (OSError, ValueError) as error:
            cure = "" if client_key else "; if its key is in another file, name that one too"
            raise InvalidArgument(f"client certificate {client_cert}: {error}{cure}") from error
    elif client_key:
        raise InvalidArgument("a client key needs a client certificate")
    return context


def has_certificate(client_cert: str | None, client_key: str | None) -> bool:
    """Returns whether a client shows a certificate, if it is asked for one."""
    if client_cert is None and client_key is None:
        client_cert = os.environ.get("PENSTOCK_CLIENT_CERT")
    return bool(client_cert)


def _no_password() -> str:
    raise ValueError("the key has a password; store it without one, readable by you only")


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
    if cause is not None and any(text in _words(cause) for text in _NO_CERTIFICATE):
        return InvalidArgument(
            f"{url} wants a client certificate that it trusts; PENSTOCK_CLIENT_CERT and "
            "PENSTOCK_CLIENT_KEY may name one"
        )
    if cause is not None and any(text in _words(cause) for text in _NO_TLS):
        return InvalidArgument(f"{url} does not speak TLS; is it {with_scheme('http', url)}?")
    return None


def _words(error: ssl.SSLError) -> str:
    return str(error).lower().replace("_", " ")


def with_scheme(scheme: str, url: str) -> str:
    return scheme + url[url.index(":") :]


def _ssl_error_in(error: BaseException | None) -> ssl.SSLError | None:
    """Returns the TLS error among an error and its causes."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
