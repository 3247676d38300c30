"""The streams that are open under access control: asked again after every change of the rules.

Invariant: when a change of the rules is answered, no stream that it forbids is open. Must not know
what a stream carries.
"""

from __future__ import annotations

import logging
from typing import Protocol

_log = logging.getLogger("penstock.server")


class GuardedStream(Protocol):
    def recheck(self) -> None:
        """Ends what the principal may no longer have. Deliveries stop before the connection is
        told."""
        ...


class OpenStreams:
    def __init__(self) -> None:
        self._streams: dict[GuardedStream, None] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: GuardedStream) -> None:
        self._streams[stream] = None

    def discard(self, stream: GuardedStream) -> None:
        self._streams.pop(stream, None)

    def recheck(self) -> None:
        for stream in list(self._streams):
            try:
                stream.recheck()
            except Exception:  # noqa: BLE001 - one stream must not keep the others open
                _log.exception("a stream could not be checked again; the others are")
