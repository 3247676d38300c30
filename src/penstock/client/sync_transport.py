# Generated from aio_transport.py by scripts/generate_sync_client.py: edit that, run this.
"""Sends requests for blocking code: to the one address of a client, or to the best of several.

With several addresses, a request that was not sent goes to another address at once, and so does one
that only reads and whose connection broke. Invariant: a request that may have changed something is
never sent twice. Must not know what a request means.
"""

from __future__ import annotations

from typing import Any

import httpx

from penstock.client.addresses import MAP_PATH, AddressBook
from penstock.client.connection import is_cut_off, is_unsent, lost, quick_connect
from penstock.client.credentials import Credentials
from penstock.model.errors import OutcomeUnknown, PenstockError, Unavailable

MAP_TIMEOUT_S = 2.0
MAP_TRIES = 3
"""How many addresses are asked for the map, so that a request never waits long for it."""


class Transport:
    """The connections of a client, and the addresses that it chooses from. `options` are those of
    httpx's clients."""

    def __init__(
        self,
        book: AddressBook,
        credentials: Credentials,
        options: dict[str, Any],
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.book = book
        self._credentials = credentials
        try:
            self._http = httpx.Client(**options, transport=transport)
        except httpx.InvalidURL as error:
            raise lost(book.text, error) from error

    @property
    def is_closed(self) -> bool:
        return self._http.is_closed

    def close(self) -> None:
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        timeouts: httpx.Timeout,
        *,
        body: bytes = b"",
        is_read: bool,
        is_stream: bool = False,
    ) -> httpx.Response:
        """Returns the answer, whatever its status. `is_read`: the request changes nothing. With
        `is_stream` it returns as soon as the head of a 200 has arrived; the caller closes it."""
        if self.book.has_several:
            self.read_map()
            return self._ask_any(method, path, headers, timeouts, body, is_read, is_stream)
        try:
            return self._send(method, path, headers, timeouts, body, is_stream)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise lost(self.book.text, error) from error

    def read_map(self) -> None:
        """Finds out which broker is the owner, if that is not known."""
        book = self.book
        if not book.begin_reading():
            return
        headers = self._credentials.headers()
        tried: list[str] = []
        try:
            while len(tried) < MAP_TRIES and (address := book.next(tried)) is not None:
                tried.append(address)
                try:
                    reply = self._http.get(
                        address + MAP_PATH, headers=headers, timeout=MAP_TIMEOUT_S
                    )
                except (httpx.TransportError, httpx.InvalidURL):
                    book.failed(address)
                    continue
                if book.learn(reply.status_code, reply.content):
                    return
        finally:
            book.end_reading()

    def _ask_any(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        timeouts: httpx.Timeout,
        body: bytes,
        is_read: bool,
        is_stream: bool,
    ) -> httpx.Response:
        """Tries one address after another."""
        book, timeouts = self.book, quick_connect(timeouts)
        tried: list[str] = []
        answer: httpx.Response | None = None
        failure: PenstockError = Unavailable("there is no address left to try")
        cause: Exception | None = None
        while (address := book.next(tried)) is not None:
            tried.append(address)
            try:
                url = address + path
                answer = self._send(method, url, headers, timeouts, body, is_stream)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                book.failed(address)
                failure, cause = lost(address, error), error
                failure.__cause__ = error
                if not (is_unsent(error) or (is_read and is_cut_off(failure))):
                    raise _outcome(failure, method, path, is_read) from error
                continue
            if answer.status_code != 503:
                book.answered(address)
                return answer
            book.refused(address)
            if not is_read:
                return answer
        if answer is not None:
            return answer
        if len(tried) > 1 and failure.retryable:
            failure = Unavailable(f"{failure.message}; tried {', '.join(tried)}")
        raise failure from cause

    def _send(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        timeouts: httpx.Timeout,
        body: bytes,
        is_stream: bool,
    ) -> httpx.Response:
        request = self._http.build_request(
            method, url, content=body, headers=headers, timeout=timeouts
        )
        response = self._http.send(request, stream=is_stream)
        if is_stream and response.status_code != 200:
            response.read()
        return response


def _outcome(failure: PenstockError, method: str, path: str, is_read: bool) -> PenstockError:
    """Returns the error for a request that was sent, and is not sent again."""
    if is_read or not failure.retryable:
        return failure
    name = path.partition("?")[0]
    return OutcomeUnknown(
        f"{failure.message}; it is unknown whether a broker executed {method} {name}, which was "
        "not sent again"
    )
