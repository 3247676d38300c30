"""TLS of the broker: reads the files, again when they change, and logs refused clients.

Invariants: what is in force is a certificate with its own key and, if configured, the authorities
of clients, all read together. Files that do not fit leave the ones before in force. Clients that
are refused for their certificate again and again write one line of the log in PAUSE_S: they see
only a closed connection, and the event loop drops the error. Must not know connections.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable

from penstock.model.errors import InvalidArgument
from penstock.server.settings import Settings

PAUSE_S = 60.0

_MISSING = frozenset({"PEER_DID_NOT_RETURN_A_CERTIFICATE", "NO_CERTIFICATE_RETURNED"})
_WRONG = "CERTIFICATE_VERIFY_FAILED"

_log = logging.getLogger("penstock.server")


class RefusedCertificates:
    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._quiet_until = float("-inf")
        self._unlogged = 0

    def watch(self, context: ssl.SSLContext) -> None:
        """Notes failed handshakes of every connection that the context wraps."""
        noted = self.note

        class WatchedHandshake(ssl.SSLObject):
            def do_handshake(self) -> None:
                try:
                    super().do_handshake()
                except ssl.SSLError as error:
                    noted(error)
                    raise

        context.sslobject_class = WatchedHandshake

    def note(self, error: ssl.SSLError) -> None:
        """Logs the error if the client's certificate is the cause."""
        if error.reason not in _MISSING and error.reason != _WRONG:
            return
        now_s = self._now_s()
        if now_s < self._quiet_until:
            self._unlogged += 1
            return
        what = "showed none" if error.reason in _MISSING else "showed one that it does not accept"
        more = f" ({self._unlogged} more since the last such line)" if self._unlogged else ""
        self._quiet_until, self._unlogged = now_s + PAUSE_S, 0
        _log.warning(
            "a client was refused: tls_client_ca asks for a certificate, and it %s%s", what, more
        )


HANDSHAKE_TIMEOUT_S = 10.0
"""A slower handshake is given up: it holds a connection and nobody knows who it is."""
SHUTDOWN_TIMEOUT_S = 30.0
"""How long a client may take to read the last bytes and to answer the end of a connection."""

_Stamp = tuple[tuple[int, int, int] | None, ...]


class TlsFiles:
    """`context` is the one for new connections."""

    def __init__(self, settings: Settings) -> None:
        self._cert = settings.tls_cert
        self._key = settings.tls_key
        self._client_ca = settings.tls_client_ca
        self._is_required = settings.tls_client_auth == "required"
        self._seen = self._stamp()
        self.context = self._load()

    def changed_context(self, *, is_asked: bool = False) -> ssl.SSLContext | None:
        """Returns a new context if the files have changed, or always if `is_asked`. Returns None if
        there is nothing new, or if the files do not fit."""
        stamp = self._stamp()
        if stamp == self._seen and not is_asked:
            return None
        self._seen = stamp
        try:
            self.context = self._load()
        except InvalidArgument as error:
            _log.error("TLS stays as it was: %s", error.message)
            return None
        _log.info("the TLS files were read again")
        return self.context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # A key with a password would ask for it on the terminal.
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"tls_cert {self._cert}, tls_key {self._key}: {error}") from error
        if self._client_ca:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise InvalidArgument(f"tls_client_ca {self._client_ca}: {error}") from error
            is_required = self._is_required
            context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
        return context

    def _stamp(self) -> _Stamp:
        return tuple(map(_stamp_of, (self._cert, self._key, self._client_ca)))


def open_tls(settings: Settings) -> TlsFiles | None:
    """Returns None if the broker serves without TLS."""
    if not settings.tls_cert and not settings.tls_key:
        if settings.tls_client_ca:
            raise InvalidArgument("tls_client_ca needs tls_cert and tls_key")
        return None
    if not settings.tls_cert or not settings.tls_key:
        raise InvalidArgument("tls_cert and tls_key belong together")
    return TlsFiles(settings)


def _no_password() -> str:
    raise ValueError("the key has a password; store it without one, readable by the broker only")


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    if not path:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
