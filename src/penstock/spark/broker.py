"""A connection to the broker, for the driver and the executors: calls, and streams of rows.

Invariant: a broker that is away is waited for, `retry_s` and no longer; what waiting cannot mend is
raised at once. A stream of rows that breaks off is never taken for a whole one: Arrow's end mark
tells. The token is in no text. Only the standard library is used, for a body of many megabytes goes
from the socket into Arrow without a copy in between. Must not know what is asked for.
"""

from __future__ import annotations

import http.client
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlencode, urlsplit

import pyarrow as pa

from penstock import __version__
from penstock.client.calls import error_of
from penstock.client.tls import context_for, refusal_of, with_scheme
from penstock.model.errors import (
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from penstock.spark.options import BrokerSettings

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
"""Longer than the broker holds back any answer."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_JSON = "application/json"


class Patience:
    """How long one goes on trying. Progress begins the time anew."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self.renew()

    def renew(self) -> None:
        self._since: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def bear(self, error: PenstockError) -> None:
        """Waits before the next try; raises the error when there is to be none."""
        if not error.retryable:
            raise error
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


class Broker:
    """One kept connection for calls; every stream of rows has its own. Not for several threads."""

    def __init__(self, settings: BrokerSettings) -> None:
        parts = urlsplit(settings.url)
        self._settings = settings
        self.url = settings.url
        self.retry_s = settings.retry_s
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._is_secure else 80)
        self._prefix = parts.path
        self._headers = {"Host": parts.netloc, "User-Agent": f"penstock-spark/{__version__}"}
        if settings.token:
            self._headers["Authorization"] = f"Bearer {settings.token}"
        self._kept: http.client.HTTPConnection | None = None
        self._has_answered = False

    def __reduce__(self) -> tuple[type[Broker], tuple[BrokerSettings]]:
        """A copy has no connection yet."""
        return Broker, (self._settings,)

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Whoever calls again connects again."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def patience(self) -> Patience:
        return Patience(self.retry_s)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        content_type: str = _JSON,
        query: Mapping[str, str | int] | None = None,
        patience: Patience | None = None,
    ) -> bytes:
        """The answer's body. Tried again while the broker is away or full, so what is asked for
        must be the same when it is done twice."""
        patience = patience or self.patience()
        target = _target(path, query)
        while True:
            try:
                return self._exchange(method, target, body, content_type)
            except PenstockError as error:
                patience.bear(error)

    def rows(self, path: str, query: Mapping[str, str | int]) -> RowStream:
        """Opens a stream of record batches, in one try."""
        with self._failures():
            return self._open_rows(_target(path, query))

    def _exchange(self, method: str, target: str, body: bytes, content_type: str) -> bytes:
        headers = self._headers | ({"Content-Type": content_type} if body else {})
        with self._failures():
            was_kept = self._kept is not None
            try:
                status, content = self._ask(method, target, body, headers)
            except ConnectionError:
                if not was_kept:
                    raise
                # The broker has closed what was idle for long, or was restarted.
                status, content = self._ask(method, target, body, headers)
        if not 200 <= status < 300:
            raise self._refusal(status, content)
        return content

    def _ask(
        self, method: str, target: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            # A broker that refuses a body answers before it has read it.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._prefix + target, body or None, headers)
            answer = connection.getresponse()
            self._has_answered = True
            content = answer.read()
        except BaseException:
            self.close()
            raise
        if answer.will_close:
            self.close()
        return answer.status, content

    def _connection(self) -> http.client.HTTPConnection:
        if self._kept is None:
            kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
            connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
            connection.connect()
            connection.sock.settimeout(READ_TIMEOUT_S)
            self._kept = connection
        return self._kept

    def _open_rows(self, target: str) -> RowStream:
        """As HTTP/1.0, whose body is not cut into chunks and ends with the connection."""
        connected: socket.socket = socket.create_connection(
            (self._host, self._port), CONNECT_TIMEOUT_S
        )
        try:
            if self._is_secure:
                context = context_for("https")
                connected = context.wrap_socket(connected, server_hostname=self._host)
            connected.settimeout(READ_TIMEOUT_S)
            lines = [f"GET {self._prefix}{target} HTTP/1.0"]
            lines += [f"{name}: {value}" for name, value in self._headers.items()]
            connected.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
            answer = http.client.HTTPResponse(connected, method="GET")
            answer.begin()
            if answer.status != 200:
                raise self._refusal(answer.status, answer.read())
            return RowStream(answer, connected)
        except BaseException:
            connected.close()
            raise

    def _refusal(self, status: int, content: bytes) -> PenstockError:
        error = error_of(status, content)
        if isinstance(error, Unauthenticated):
            return Unauthenticated(
                f"the broker at {self.url} does not take the token, or wants one; set the option "
                "token, or PENSTOCK_TOKEN before Spark starts"
            )
        return error

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What a failure of the connection means."""
        try:
            yield
        except TimeoutError as error:
            raise Unavailable(f"the broker at {self.url} did not answer in time") from error
        except (ConnectionRefusedError, socket.gaierror) as error:
            raise Unavailable(
                f"no broker answers at {self.url} ({error.strerror}); `penstock serve` starts one"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise refusal_of(self.url, error) or self._broken(error) from error

    def _broken(self, error: Exception) -> Unavailable:
        text = f"the connection to {self.url} broke: {str(error) or type(error).__name__}"
        is_hung_up = isinstance(error, http.client.RemoteDisconnected)
        if is_hung_up and not self._is_secure and not self._has_answered:
            text += f"; a port of TLS does so too, is it {with_scheme('https', self.url)}?"
        return Unavailable(text)


class RowStream:
    """Record batches as they arrive. Raises Unavailable where it breaks off."""

    def __init__(self, answer: http.client.HTTPResponse, connected: socket.socket) -> None:
        self._body = _Body(answer)
        self._connected = connected

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            with pa.ipc.open_stream(self._body) as stream:
                yield from stream
        except (pa.ArrowInvalid, OSError, http.client.HTTPException) as error:
            raise Unavailable(f"the rows broke off: {error}") from error
        if self._body.last != END_MARK:
            raise Unavailable("the rows broke off between two batches")

    def __enter__(self) -> RowStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._body.close()
        self._connected.close()


class _Body:
    """The file that Arrow reads. A stream that just stops is a whole one to Arrow, so the bytes it
    read last are kept."""

    closed = False

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self.last = b""

    def read(self, size: int) -> bytes:
        data = self._answer.read(size)
        if data:
            kept = self.last if len(data) < len(END_MARK) else b""
            self.last = (kept + data[-len(END_MARK) :])[-len(END_MARK) :]
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        self._answer.close()


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path
