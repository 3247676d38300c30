"""A connection to the broker for the driver and the executors: calls, and streams of rows.

Adds two things to the client: it waits for a broker that is away, and it reads Arrow. Invariants:
it waits at most `retry_s`, and raises errors at once that waiting cannot cure; a stream of rows
that breaks off is never taken for a whole one; no text contains the token. Must not know what a
request means.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

import pyarrow as pa

from penstock import __version__
from penstock.client.body import BodyReader
from penstock.client.calls import Call
from penstock.client.connection import is_cut_off
from penstock.client.sync import Client
from penstock.client.tls import with_scheme
from penstock.model.errors import PenstockError, ResourceExhausted, Unauthenticated, Unavailable
from penstock.spark.options import BrokerSettings

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
"""Longer than the broker ever takes to begin an answer."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_JSON = "application/json"

T = TypeVar("T")


class RetryTime:
    """Limits how long a request is repeated. Progress starts the time again, and so does the debt
    of a quota that is being paid back: the broker says how long that takes, which may be long after
    a large batch."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._told_ms = 0
        self.renew()

    def renew(self) -> None:
        self._since: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def wait_after(self, error: PenstockError) -> None:
        """Waits before the next attempt. Raises the error if there is to be none."""
        if not error.retryable:
            raise error
        if isinstance(error, ResourceExhausted) and error.reason == "quota":
            if error.retry_after_ms < self._told_ms:
                self.renew()
            self._told_ms = error.retry_after_ms
        now = self._clock()
        if self._since is None:
            self._since = now
        left = self._since + self._seconds - now
        if left <= 0:
            raise self._given_up(error) from error
        pause = self._pause_s * random.uniform(0.5, 1.0)
        if isinstance(error, ResourceExhausted):
            pause = max(pause, error.retry_after_ms / 1000)
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        self._sleep(min(pause, left))

    def _given_up(self, error: PenstockError) -> PenstockError:
        text = error.message
        if self._seconds:
            text += f"; tried for {self._seconds:g} s (option retrySeconds)"
        if isinstance(error, ResourceExhausted):
            return ResourceExhausted(
                text,
                limit=error.limit,
                retry_after_ms=error.retry_after_ms,
                partition=error.partition,
                reason=error.reason,
            )
        return Unavailable(text)


class BrokerConnection:
    """A connection to a broker. Not for several threads."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self.url = settings.url
        self.retry_s = settings.retry_s
        self._client: Client | None = None
        self._has_answered = False

    def __reduce__(self) -> tuple[type[BrokerConnection], tuple[BrokerSettings]]:
        """Makes a copy that has not connected yet."""
        return BrokerConnection, (self._settings,)

    def __enter__(self) -> BrokerConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. The next call connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def retry_time(self) -> RetryTime:
        return RetryTime(self.retry_s)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        content_type: str = _JSON,
        query: Mapping[str, str | int] | None = None,
        retry_time: RetryTime | None = None,
    ) -> bytes:
        """Sends a request and returns the body of its answer. Repeats it while the broker is away
        or full, so the request must have the same effect when it is executed twice."""
        retry_time = retry_time or self.retry_time()
        call = Call(
            method,
            _target(path, query),
            bytes,
            body,
            wait_s=READ_TIMEOUT_S,
            content_type=content_type if body else "",
        )
        while True:
            try:
                return self._ask(lambda client: client.send(call))
            except PenstockError as error:
                retry_time.wait_after(error)

    def rows(self, path: str, query: Mapping[str, str | int]) -> RowStream:
        """Opens a stream of record batches. Does not wait for a broker that is away."""
        target = _target(path, query)
        response = self._ask(lambda client: client.open_stream(target, READ_TIMEOUT_S))
        return RowStream(BodyReader(response, self.url))

    def _ask(self, send: Callable[[Client], T]) -> T:
        client = self._connected()
        try:
            answer = self._send(client, send)
        except PenstockError as error:
            raise self._explained(error) from error.__cause__
        self._has_answered = True
        return answer

    def _send(self, client: Client, send: Callable[[Client], T]) -> T:
        try:
            return send(client)
        except Unavailable as error:
            if not (self._has_answered and is_cut_off(error)):
                raise
        # The broker has closed a connection that was idle for long, or was restarted.
        return send(client)

    def _explained(self, error: PenstockError) -> PenstockError:
        """Returns the error with advice for users of Spark."""
        if isinstance(error, Unauthenticated):
            return Unauthenticated(
                f"the broker at {self.url} does not take the token, or wants one; set the option "
                "token, or PENSTOCK_TOKEN before Spark starts"
            )
        is_plain = self.url.startswith("http:") and "," not in self.url
        if is_cut_off(error) and is_plain and not self._has_answered:
            https = with_scheme("https", self.url)
            return Unavailable(f"{error.message}; a port of TLS does so too, is it {https}?")
        # Only a failure of the connection has a cause. Any other error is the broker's answer.
        self._has_answered = self._has_answered or error.__cause__ is None
        return error

    def _connected(self) -> Client:
        if self._client is None:
            self._client = Client(
                self.url,
                token=self._settings.token,
                tenant=self._settings.tenant,
                namespace=self._settings.namespace,
                timeout_s=CONNECT_TIMEOUT_S,
                user_agent=f"penstock-spark/{__version__}",
            )
        return self._client


class RowStream:
    """Record batches as they arrive. Raises Unavailable if the connection breaks before the end.

    A body that just stops is a whole one to Arrow. So the stream keeps the last bytes that Arrow
    has read, and compares them with Arrow's end mark.
    """

    closed = False

    def __init__(self, body: BodyReader) -> None:
        self._body = body
        self._last = b""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            with pa.ipc.open_stream(self) as stream:
                yield from stream
        except (pa.ArrowInvalid, OSError, Unavailable) as error:
            raise Unavailable(f"the rows broke off: {error}") from error
        if self._last != END_MARK:
            raise Unavailable("the rows broke off between two batches")

    def read(self, size: int) -> bytes:
        """Reads the body for Arrow."""
        data = self._body.read(size)
        if data:
            kept = self._last if len(data) < len(END_MARK) else b""
            self._last = (kept + data[-len(END_MARK) :])[-len(END_MARK) :]
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self._body.close()

    def __enter__(self) -> RowStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path
