"""Where a client's address and token come from, and when the token is read again.

An argument wins over the environment: PENSTOCK_URL, and PENSTOCK_TOKEN_FILE before PENSTOCK_TOKEN.
A token that a function or the environment gives is read again when the broker answers 401, so that
a program that runs for months outlives a change of the token. Must not know how requests are sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock.model.errors import InvalidArgument, PenstockError

DEFAULT_URL = "http://127.0.0.1:8080"

Token = str | Callable[[], str]
"""The token, or a function that returns the one in force. It is called when the client is made and
after a 401, in the thread or loop that sent the request, so it should be quick."""


def url_of(url: str | None) -> str:
    """The address to use: the argument, else PENSTOCK_URL, else a broker on this machine."""
    if url is not None:
        return url
    return os.environ.get("PENSTOCK_URL") or DEFAULT_URL


class Credentials:
    """`token` is the one that requests are sent with; empty means none."""

    def __init__(self, token: Token | None) -> None:
        if token is None:
            self._read = _token_of_environment
        elif isinstance(token, str):
            given = token
            self._read = lambda: given
        else:
            self._read = token
        self.token = _checked(self._read())

    def headers(self) -> dict[str, str]:
        token = self.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def has_changed(self, used: str) -> bool:
        """Whether there is another token than the one that was refused. A source that cannot be
        read has none: the 401 says more to the caller than its error would."""
        try:
            self.token = _checked(self._read())
        except (PenstockError, OSError):
            return False
        return self.token != used


def read_token_file(path: str, origin: str) -> str:
    """The token in a file. `origin` names the option or variable that named the file, for the
    error when it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{origin}: {error}") from error


def _token_of_environment() -> str:
    path = os.environ.get("PENSTOCK_TOKEN_FILE")
    if path:
        return read_token_file(path, "PENSTOCK_TOKEN_FILE")
    return os.environ.get("PENSTOCK_TOKEN", "")


def _checked(token: str) -> str:
    if not (token.isascii() and token.isprintable()):
        raise InvalidArgument("the token has characters that a header cannot carry")
    return token
