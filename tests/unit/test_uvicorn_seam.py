"""The fast lane stands on uvicorn's internals; this says which, and fails when they move."""

from __future__ import annotations

import inspect

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

USED_METHODS = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "on_message_begin": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
    "_start_asgi_task": ["self", "cycle", "app"],
    "_should_upgrade": ["self"],
    "handle_websocket_upgrade": ["self"],
    "send_400_response": ["self", "msg"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "shutdown": ["self"],
}


def test_uvicorn_is_the_release_the_lane_was_written_for() -> None:
    assert uvicorn.__version__.startswith("0.54."), "read http/connection.py again"


@pytest.mark.parametrize("name", USED_METHODS)
def test_a_method_the_lane_overrides_or_calls_is_as_it_was(name: str) -> None:
    found = list(inspect.signature(getattr(HttpToolsProtocol, name)).parameters)
    assert found == USED_METHODS[name]


def test_a_request_starts_its_task_where_the_lane_waits_for_it() -> None:
    source = inspect.getsource(HttpToolsProtocol.on_headers_complete)
    assert "self._start_asgi_task(self.cycle, app)" in source
    assert "existing_cycle is None or existing_cycle.response_complete" in source


def test_an_answer_of_the_app_ends_where_the_lane_goes_on() -> None:
    assert "self.on_response()" in inspect.getsource(RequestResponseCycle.send)
    assert {"pause_reading", "resume_reading"} <= set(dir(FlowControl))
