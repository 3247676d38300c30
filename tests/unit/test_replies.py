"""Answers as bytes: what an error that is told still holds on to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.server.http.responses import batch_error, error_body, typed_error


class Body:
    """Of a request."""


def refuse(body: Body) -> PenstockError:
    """As a command does it: the frame has the body, and keeps the error that it caught."""
    try:
        try:
            int("no number")
        except ValueError as error:
            raise InvalidArgument("not so") from error
    except PenstockError as error:
        outcome = error
    return outcome


@pytest.mark.parametrize("tell", [typed_error, error_body, batch_error])
def test_an_error_that_is_told_lets_go_of_the_request_it_is_about(
    tell: Callable[[PenstockError], Any],
) -> None:
    gc.disable()
    try:
        body = Body()
        seen = weakref.ref(body)
        error = refuse(body)
        del body
        assert seen() is not None, "the frames hold it"
        tell(error)
        assert seen() is None
    finally:
        gc.enable()
