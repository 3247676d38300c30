"""The API's document: complete, sound in itself, true of the broker, and readable as a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from penstock.server.batches import BatchError
from penstock.server.docs_page import curl_of, render_page
from penstock.server.openapi import ERRORS, TYPED_ERRORS, build_document
from penstock.server.registry.mirror import RemoteChanges, RemoteSnapshot
from penstock.server.routes import (
    cache_settings,
    effects,
    registry,
    stream_deliveries,
    stream_ranges,
    stream_settings,
    streams,
    system,
    tenants,
    topics,
)
from penstock.server.routes.endpoint import Endpoint
from penstock.server.routes.table import ENDPOINTS
from penstock.server.schemas import required_members
from tests.broker_process import BrokerProcess
from tests.routes import NAMESPACE, all_routes

DOCUMENT = build_document()
GROUP = "/v1/topics/{topic}/groups/{group}"


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, member in value.items():
            if name == "$ref":
                yield member
            else:
                yield from references(member)
    elif isinstance(value, list):
        for member in value:
            yield from references(member)


def test_every_route_of_the_table_is_described_and_no_other() -> None:
    described = {(method, path) for method, path, _ in operations()}
    assert len(described) == len(ENDPOINTS)
    assert described == all_routes()


def test_the_document_is_openapi_3_1() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert {"title", "version"} <= set(DOCUMENT["info"])
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    ids = []
    for method, path, operation in operations():
        assert method in {"GET", "POST", "PUT", "PATCH", "DELETE"}
        assert set(operation["tags"]) <= tags
        assert operation["summary"]
        ids.append(operation["operationId"])
        assert any(status[0] in "12" for status in operation["responses"]), path
        for response in operation["responses"].values():
            assert "$ref" in response or response["description"]
    assert len(set(ids)) == len(ids)
    assert msgspec.json.decode(msgspec.json.encode(DOCUMENT)) == DOCUMENT


def test_every_reference_leads_somewhere() -> None:
    found = set(references(DOCUMENT))
    assert found
    for reference in found:
        node: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert node


def test_parameters_are_complete_and_those_of_a_path_are_in_it() -> None:
    for _, path, operation in operations():
        parameters = operation.get("parameters", [])
        keys = [(each["in"], each["name"]) for each in parameters]
        assert len(set(keys)) == len(keys)
        in_path = {name for where, name in keys if where == "path"}
        assert in_path == set(re.findall(r"\{(\w+)\}", path))
        for each in parameters:
            assert each["description"]
            assert each["schema"]["type"] in {"string", "integer", "boolean"}
            assert each["in"] in {"query", "header"} or each["required"] is True


ENTRY = "/v1/tenants/{tenant_id}/namespaces/{namespace}/caches/{cache}/entries/{key}"


@pytest.mark.parametrize(
    ("method", "path"),
    [("get", ENTRY), ("put", ENTRY), ("delete", ENTRY), ("post", f"{ENTRY}/incr")],
)
def test_the_conditions_of_an_entry_are_header_parameters(method: str, path: str) -> None:
    endpoint = DOCUMENT["paths"][path][method]
    headers = {each["name"]: each for each in endpoint["parameters"] if each["in"] == "header"}
    assert set(headers) == {"If-Match", "If-None-Match"}
    for header in headers.values():
        pattern = header["schema"]["pattern"]
        for text in ("*", '"17"', '"17", W/"x"'):
            assert re.search(pattern, text)
        for text in ("", "17", '*, "17"', '"17" "18"'):
            assert not re.search(pattern, text)
    assert "412" in endpoint["responses"]
    assert ("304" in endpoint["responses"]) is (method == "get")
    assert ("ETag" in endpoint["responses"]["200"].get("headers", {})) is (method != "delete")


def test_parameters_that_need_raw_say_so_and_have_their_types() -> None:
    parameters = {each["name"]: each for each in DOCUMENT["paths"][ENTRY]["put"]["parameters"]}
    for name in ("ttl_ms", "if_not_exists", "if_version", "request_id"):
        assert "Only with raw=true" in parameters[name]["description"]
    assert parameters["ttl_ms"]["schema"]["type"] == "integer"
    assert parameters["if_not_exists"]["schema"]["type"] == "boolean"
    delete = DOCUMENT["paths"][ENTRY]["delete"]["parameters"]
    assert not any("raw" in each["description"] for each in delete)


def test_every_error_answer_has_the_common_shape() -> None:
    for name, response in DOCUMENT["components"]["responses"].items():
        is_typed, status = name.startswith("typed-"), int(name.removeprefix("typed-"))
        example = response["content"]["application/json"]["example"]
        assert example["error"] == (TYPED_ERRORS if is_typed else ERRORS)[status][0]
        assert {"error", "message"} <= set(example)
        assert ("type" in example) == is_typed
    for _, path, endpoint in operations():
        assert {"403", "405", "500"} <= set(endpoint["responses"]), path


def named(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


@pytest.mark.parametrize(
    "endpoint", [each for each in ENDPOINTS if each.body is not None], ids=named
)
def test_the_example_of_a_body_is_one(endpoint: Endpoint) -> None:
    examples = endpoint.example if endpoint.batch else [endpoint.example]
    for example in examples:
        msgspec.json.decode(msgspec.json.encode(example), type=endpoint.body)
        assert set(required_members(endpoint.body)) <= set(example)


def test_required_members_and_descriptions_are_in_the_schemas() -> None:
    schema = DOCUMENT["components"]["schemas"]["ProduceBody"]
    assert schema["required"] == ["topic", "value"]
    assert schema["additionalProperties"] is False
    envelope, nothing = schema["properties"]["envelope"]["anyOf"]
    assert envelope["$ref"].endswith("/EnvelopeBody")
    assert nothing == {"type": "null"}
    for name in ("ProduceBody", "EnvelopeBody", "AckBody", "ConsumeBody", "LeasedEffectBody"):
        for member, text in DOCUMENT["components"]["schemas"][name]["properties"].items():
            is_required = member in DOCUMENT["components"]["schemas"][name].get("required", ())
            assert ({"type": "null"} in text.get("anyOf", [])) is not is_required, (name, member)
            assert text.get("description") or "Body" in str(text), (name, member)


# -- against a broker ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(None) as process:
        yield process


def test_answers_have_the_shapes_that_are_documented(broker: BrokerProcess) -> None:
    client = broker.client

    def check(reply: Any, shape: type[msgspec.Struct]) -> None:
        body = reply if isinstance(reply, dict) else reply.json()
        msgspec.convert(body, shape, strict=True)
        assert set(body) <= set(shape.__struct_fields__)

    check(client.post("/v1/topics", json={"name": "orders"}), topics.TopicAnswer)
    check(client.get("/v1/topics"), topics.TopicNames)
    check(client.get("/v1/healthz"), system.Status)
    check(client.get("/v1/readyz"), system.Status)
    check(client.get("/v1/version"), system.VersionAnswer)
    effect = {"topic": "orders", "group": "g", "key": "k", "owner": "o"}
    check(client.post("/v1/idempotency/begin", json=effect), effects.Begun)
    batch = client.post("/v1/produce/batch", json=[{"topic": "nowhere", "value": "v"}])
    check(batch.json()["results"][0], BatchError)


def test_answers_of_streams_and_the_registry_have_the_shapes_that_are_documented(
    broker: BrokerProcess,
) -> None:
    """felix-131"""
    here = NAMESPACE.format(tenant_id="default", namespace="default")

    def check(path: str, shape: type[msgspec.Struct]) -> None:
        body = broker.client.get(path).json()
        msgspec.convert(body, shape, strict=True)
        assert set(body) <= set(shape.__struct_fields__)

    check("/v1/tenants", tenants.TenantList)
    check("/v1/tenants/default", tenants.TenantAnswer)
    check("/v1/tenants/default/namespaces", tenants.NamespaceList)
    check(here, tenants.NamespaceAnswer)
    check(f"{here}/streams", stream_settings.StreamList)
    check(f"{here}/streams/default", stream_settings.StreamAnswer)
    check(f"{here}/caches", cache_settings.CacheList)
    check(f"{here}/caches/default", cache_settings.CacheAnswer)
    check("/v1/registry", registry.RegistryAnswer)
    check("/v1/registry/snapshot", RemoteSnapshot)
    check("/v1/registry/changes?since=4", RemoteChanges)
    with broker.client.stream("GET", f"{here}/streams/default/subscribe"):
        check(f"{here}/streams/default/subscriptions", streams.Subscriptions)


@pytest.mark.parametrize(
    "endpoint",
    [
        each
        for each in ENDPOINTS
        if each.tag in ("Streams", "Caches")
        and each.body is not None
        and not each.batch
        and 204 not in each.answers
        # Progress needs a durable stream, as settlements do.
        and "{subscription}" not in each.path
    ],
    ids=named,
)
def test_what_is_said_to_be_required_is_and_the_example_works(
    broker: BrokerProcess, endpoint: Endpoint
) -> None:
    path = endpoint.path.format(
        tenant_id="default", namespace="default", stream="default", cache="default", key="counter"
    )
    example = endpoint.example
    if endpoint.method == "PUT":
        path += "-of-text"
    assert broker.client.request(endpoint.method, path, json=example).status_code == 200
    if endpoint.path != "/v1/felix":
        least = {name: example[name] for name in required_members(endpoint.body)}
        assert broker.client.request(endpoint.method, path, json=least).status_code == 200
    for member in required_members(endpoint.body):
        rest = {name: text for name, text in example.items() if name != member}
        reply = broker.client.request(endpoint.method, path, json=rest)
        assert (reply.status_code, reply.json()["error"]) == (400, "INVALID_ARGUMENT")
        assert f"{member} is required" in reply.json()["message"]


ON_DURABLE_STREAMS = [
    *(each for each in stream_deliveries.ENDPOINTS if each.body is not None and not each.batch),
    stream_ranges.ENDPOINTS[-1],
]


@pytest.mark.parametrize("endpoint", ON_DURABLE_STREAMS, ids=named)
def test_what_is_said_to_be_required_of_a_settlement_is(
    broker: BrokerProcess, endpoint: Endpoint
) -> None:
    """That the examples work needs a delivery: the contract tests do it."""
    path = endpoint.path.format(
        tenant_id="default", namespace="default", stream="default", subscription="billing"
    )
    for member in required_members(endpoint.body):
        rest = {name: text for name, text in endpoint.example.items() if name != member}
        reply = broker.client.request(endpoint.method, path, json=rest)
        assert (reply.status_code, reply.json()["error"]) == (400, "INVALID_ARGUMENT")
        assert f"{member} is required" in reply.json()["message"]


def test_the_document_and_the_page_are_served(broker: BrokerProcess) -> None:
    """driftq-63"""
    assert broker.client.get("/docs/openapi.json").json() == DOCUMENT
    page = broker.client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert f"{broker.url}/v1/produce" in page.text


@pytest.mark.parametrize("path", ["/docs/", "/docs/nothing", "/docsy", "/docs/openapi.json/x"])
def test_an_unknown_path_below_docs_is_404_in_the_common_shape(
    broker: BrokerProcess, path: str
) -> None:
    """driftq-65"""
    reply = broker.client.get(path, headers={"X-Request-Id": "mine"})
    assert reply.status_code == 404
    assert set(reply.json()) == {"error", "message"}
    assert reply.json()["error"] == "NOT_FOUND"
    assert reply.headers["x-request-id"] == "mine"


def test_a_wrong_method_below_docs_is_405_in_the_common_shape(broker: BrokerProcess) -> None:
    """driftq-64"""
    reply = broker.client.post("/docs")
    assert reply.status_code == 405
    assert "GET" in reply.headers["allow"]
    assert reply.json()["error"] == "METHOD_NOT_ALLOWED"
    assert reply.headers["x-request-id"]


# -- the page ------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects the tags that are open, the links, the anchors and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value or "")
            elif name in {"href", "src"}:
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere() -> None:
    page = Page(render_page(DOCUMENT, "http://127.0.0.1:8080"))
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe"}
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.anchors, link
        else:
            assert link in {"/docs/openapi.json", "/docs/asyncapi.json", "/metrics"}
    for method, path, operation in operations():
        assert operation["operationId"] in page.anchors
        assert curl_of(method, path, operation, "http://127.0.0.1:8080") in page.text


def test_nothing_of_the_document_or_the_address_gets_out_of_its_place() -> None:
    document = msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    evil = "<script>'\"&"
    operation = document["paths"]["/v1/ack"]["post"]
    operation |= {"summary": evil, "description": evil, "operationId": evil}
    document["info"]["title"] = evil
    page = Page(render_page(document, f"http://{evil}"))
    assert "script" not in page.tags
    assert page.open == []
    assert evil in page.text


def test_an_example_can_be_pasted_into_a_shell() -> None:
    produce = DOCUMENT["paths"]["/v1/produce"]["post"]
    command = curl_of("POST", "/v1/produce", produce, "http://h:1")
    assert command.startswith("curl -s http://h:1/v1/produce \\\n  -d '{")
    consume = DOCUMENT["paths"]["/v1/consume"]["get"]
    assert curl_of("GET", "/v1/consume", consume, "http://h:1") == (
        "curl -sN 'http://h:1/v1/consume?topic=orders&group=billing&owner=w1&lease_ms=30000'"
    )
    delete = DOCUMENT["paths"][GROUP]["delete"]
    assert curl_of("DELETE", GROUP, delete, "http://h:1") == (
        "curl -s -X DELETE http://h:1/v1/topics/orders/groups/billing"
    )
