"""Tells the operator that a client was refused for its certificate.

Such a client sees only a closed connection, and the event loop drops the error. Invariant: clients
that try again and again write one line of the log in PAUSE_S. Must not know who the clients are.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable

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
