"""The address and the token of a client.

An argument wins over the environment, where PENSTOCK_TOKEN_FILE wins over PENSTOCK_TOKEN. A token
that comes from a function or the environment is read again when the broker answers 401, so that a
program that runs for months survives a change of the token. Must not know how requests are sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock.model.errors import InvalidArgument, PenstockError

DEFAULT_URL = "http://127.0.0.1:8080"

Token = str | Callable[[], str]
"""The token, or a function that returns the current one. The client calls it when it is made and
after a 401, in the thread or event loop that sent the request, so it should be quick."""


def url_of(url: str | None) -> str:
    """Returns the argument, else PENSTOCK_URL, else the address of a broker on this machine."""
    if url is not None:
        return url
    return os.environ.get("PENSTOCK_URL") or DEFAULT_URL


class Credentials:
    """The `token` that requests are sent with; empty means none. `can_change`: it is not a text."""

    def __init__(self, token: Token | None) -> None:
        self.can_change = not isinstance(token, str)
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
        """Reads the token again and tells whether it differs from the one that was refused. Returns
        False if it cannot be read: the 401 tells the caller more than that error."""
        try:
            self.token = _checked(self._read())
        except (PenstockError, OSError):
            return False
        return self.token != used


def read_token_file(path: str, origin: str) -> str:
    """Reads the token from a file. The error for a file that cannot be read begins with `origin`,
    the option or variable that named it."""
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
