"""A streamed response as a file, for readers such as Arrow that want one.

Invariant: `read` returns as many bytes as asked for, or fewer only at the end of the body. Must not
know what the bytes mean.
"""

from __future__ import annotations

import httpx

from penstock.client.connection import lost


class BodyReader:
    """Reads the body of a response that `Client.open_stream` has opened. Close it after use."""

    closed = False

    def __init__(self, response: httpx.Response, url: str) -> None:
        self._response = response
        self._url = url
        self._chunks = response.iter_raw()
        self._unread = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes. Raises Unavailable if the connection breaks."""
        parts: list[memoryview] = []
        while size > 0 and self._fill():
            parts.append(self._unread[:size])
            self._unread = self._unread[size:]
            size -= len(parts[-1])
        return b"".join(parts)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self._response.close()

    def _fill(self) -> bool:
        """Makes sure that there are unread bytes. Returns False at the end of the body."""
        try:
            while not self._unread:
                self._unread = memoryview(next(self._chunks))
        except StopIteration:
            return False
        except (httpx.TransportError, httpx.StreamError) as error:
            raise lost(self._url, error) from error
        return True
