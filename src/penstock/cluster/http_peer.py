"""The sealed files of another broker over HTTP, from its internal path COPY_PATH."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import httpx

from penstock.api.cluster import COPY_PATH
from penstock.cluster.copying import FileGone, PeerFailed

TIMEOUT_S = 30.0


class HttpPeer:
    """`token` returns the cluster's own credential, empty if there is none; it is read for every
    request. Used by one thread."""

    def __init__(
        self,
        name: str,
        url: str,
        token: Callable[[], str],
        tls: Callable[[], ssl.SSLContext],
    ) -> None:
        self.name = name
        self._url = url.rstrip("/") + COPY_PATH
        self._token = token
        self._tls = tls
        self._client: httpx.Client | None = None

    def manifest(self) -> bytes:
        return self._get({})

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self._get({"file": name, "offset": str(offset), "length": str(length)})

    def _get(self, query: dict[str, str]) -> bytes:
        token = self._token()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            if self._client is None:
                verify = self._tls() if self._url.startswith("https:") else True
                self._client = httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=verify)
            reply = self._client.get(self._url, params=query, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise PeerFailed(f"{type(error).__name__}: {error}") from error
        if reply.status_code == 404 and query:
            raise FileGone(query["file"])
        if reply.status_code != 200:
            raise PeerFailed(f"it answers {reply.status_code}: {reply.text[:200]}")
        return reply.content
