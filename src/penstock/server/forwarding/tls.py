"""TLS from one broker to another: whom it trusts, and what it shows.

A broker checks the owner's certificate and host name. It shows its own certificate if it has one:
the owner may ask every connection for one. Must not know connections.
"""

from __future__ import annotations

import ssl

from penstock.model.errors import InvalidArgument
from penstock.server.settings import Settings


def upstream_tls(settings: Settings) -> ssl.SSLContext:
    """Returns the context for connections to other brokers. Reads the files anew."""
    try:
        context = ssl.create_default_context(cafile=settings.cluster_ca or None)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cluster_ca {settings.cluster_ca}: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if settings.tls_cert:
        try:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"tls_cert {settings.tls_cert}: {error}") from error
    return context
