"""TLS in front of a broker, as operators put it there, with a certificate that only tests trust.

Without the `openssl` command, tests that need it are left out, but never in CI.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

_REQUEST = """\
[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
CN = penstock tests
[extensions]
basicConstraints = critical, CA:TRUE
keyUsage = critical, digitalSignature, keyCertSign
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid:always
subjectAltName = {name}
"""
"""All that a strict check of a certificate wants, whatever the system's own configuration says."""


class Certificate(NamedTuple):
    """Signed by itself: it is the authority to trust, too."""

    file: Path
    key: Path


def make_certificate(folder: Path, name: str = "IP:127.0.0.1") -> Certificate:
    if shutil.which("openssl") is None and os.environ.get("CI") != "true":
        pytest.skip("openssl is not installed")
    request = folder / "request.cnf"
    request.write_text(_REQUEST.format(name=name))
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-config", str(request), "-keyout", str(made.key), "-out", str(made.file)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return made


@contextmanager
def tls_proxy(port: int, certificate: Certificate) -> Iterator[str]:
    """The address of a proxy that passes on to a port of this machine what comes over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file, certificate.key)
    proxy = _Proxy(port, context)
    thread = Thread(target=lambda: asyncio.run(proxy.run()))
    thread.start()
    try:
        yield f"https://127.0.0.1:{proxy.port.result(10)}"
    finally:
        proxy.stop()
        thread.join(10)


class _Proxy:
    def __init__(self, behind: int, context: ssl.SSLContext) -> None:
        self.port: Future[int] = Future()
        self._behind = behind
        self._context = context
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port.set_result(server.sockets[0].getsockname()[1])
        await self._stopping.wait()
        server.close()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._behind)
        pumps = [
            asyncio.create_task(_pump(reader, back)),
            asyncio.create_task(_pump(there, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            # What one side has said is said to the other before it is hung up.
            for each in (writer, back):
                each.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
