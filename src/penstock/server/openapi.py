"""The OpenAPI 3.1 document of the API, made of the endpoints and their structs.

Invariant: a pure function of the endpoints; nothing of a running broker is in it. Must not know
how it is shown.
"""

from __future__ import annotations

import re

import msgspec

from penstock import __version__
from penstock.model.limits import MAX_BATCH_ITEMS
from penstock.server.batches import BatchError
from penstock.server.http.request_headers import SCOPE_HEADERS
from penstock.server.http.responses import TYPED_PATHS, ErrorBody, OverloadBody, TypedErrorBody
from penstock.server.members import NAME_PATTERN
from penstock.server.message_actions import MESSAGES
from penstock.server.routes.endpoint import TAGS, Answer, Endpoint, PathNames
from penstock.server.routes.table import ENDPOINTS
from penstock.server.schemas import Json, plain_members, ref, required_members, schemas_of

ABOUT = (
    "A durable message broker. Most requests take a JSON body or, for trying things out, query "
    "parameters; those of streams, caches and tenants take JSON. A body is decoded strictly, "
    'and unknown members are refused. Every error has the shape {"error": CODE, "message": '
    "text}. The answer repeats the X-Request-Id of the request, or has a new one."
)
ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("INVALID_ARGUMENT", "The request is wrong.", "topic is required"),
    401: ("UNAUTHENTICATED", "The bearer token is missing or wrong.", "a token is required"),
    403: (
        "PERMISSION_DENIED",
        "A permission is missing, or this Origin or Host is not allowed.",
        "not allowed",
    ),
    404: ("NOT_FOUND", "No such topic or group.", "no such topic: 'orders'"),
    405: ("METHOD_NOT_ALLOWED", "See the Allow header.", "this path takes POST"),
    409: ("FAILED_PRECONDITION", "The state does not allow it.", "not owner"),
    410: ("OUT_OF_RANGE", "It is no longer kept.", "offsets below 500 are no longer kept"),
    412: (
        "FAILED_PRECONDITION",
        "A value of a cache has changed since it was read; nothing was done.",
        "key 'greeting' has version 1767225600000002, not 1767225600000001",
    ),
    413: ("INVALID_ARGUMENT", "Something is over its limit.", "max_message_bytes is 8388608"),
    416: (
        "OUT_OF_RANGE",
        "It is in the future.",
        "the partition ends at offset 13; 20 was asked for",
    ),
    429: ("RESOURCE_EXHAUSTED", "A limit is reached; see Retry-After.", "the partition is full"),
    500: ("INTERNAL", "A defect of the broker.", "internal error; the broker's log says more"),
    503: (
        "UNAVAILABLE",
        "The log cannot be written, or the broker is stopping.",
        "the disk is full",
    ),
}
ALWAYS = (401, 403, 405, 500)
PROBES = frozenset({"/v1/healthz", "/v1/livez", "/v1/readyz"})

TYPED_ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("INVALID_ARGUMENT", "The request is wrong.", "tenant_id is required"),
    401: ERRORS[401],
    403: ERRORS[403],
    404: (
        "NOT_FOUND",
        "No such tenant, namespace, stream or cache; the message says which.",
        "stream not found: 'acme/prod/orders'",
    ),
    405: ERRORS[405],
    409: (
        "ALREADY_EXISTS",
        "It exists already; or (FAILED_PRECONDITION) the state does not allow the request: not "
        "empty, not a number, cannot change.",
        "key 'greeting' exists with version 1767225600000001",
    ),
    410: (
        "OUT_OF_RANGE",
        "The changes are no longer kept; take a snapshot.",
        "changes after revision 3 are no longer kept; take a snapshot",
    ),
    412: (
        "FAILED_PRECONDITION",
        "The value has changed since it was read; nothing was done.",
        "key 'greeting' has version 1767225600000002, not 1767225600000001",
    ),
    413: ERRORS[413],
    416: (
        "OUT_OF_RANGE",
        "The revision is in the future.",
        "revision 9 is to come; the registry is at 5",
    ),
    426: (
        "INVALID_ARGUMENT",
        "This path takes only WebSocket upgrades.",
        "this path speaks WebSocket; ask for an upgrade, version 13",
    ),
    429: (
        "RESOURCE_EXHAUSTED",
        "A limit is reached; see Retry-After.",
        "the broker is overloaded: the publish queue of stream 'acme/prod/orders' is full",
    ),
    500: ERRORS[500],
    503: (
        "UNAVAILABLE",
        "The log cannot be written, the control plane cannot be reached, or the broker is "
        "stopping.",
        "the control plane cannot be reached; nothing was changed",
    ),
}
"""Errors of streams, caches and the registry. Their bodies have a `type`."""

_ETAG = r'(W/)?"[!#-+\--~]*"'
_ETAGS: Json = {
    "type": "string",
    "pattern": rf"^(\*|{_ETAG}( *, *{_ETAG})*)$",
    "examples": ['"1767225600000001"', "*"],
}
"""The schema of If-Match and If-None-Match."""

_SCOPE_HEADERS = {
    "tenant": "The tenant that the request is about; if left out, that of the credential",
    "namespace": "The namespace that it is about; if left out, that of the credential",
}


def build_document() -> Json:
    schemas = _schemas()
    paths: dict[str, Json] = {}
    for endpoint in ENDPOINTS:
        path = paths.setdefault(endpoint.path, {})
        path[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": ABOUT},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error_response(status) for status in ERRORS}
            | {f"typed-{status}": _typed_response(status) for status in TYPED_ERRORS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> Json:
    words = re.findall(r"[a-z]+", endpoint.path.removeprefix("/v1"))
    described: Json = {
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "operationId": "_".join([endpoint.method.lower(), *words]),
        "responses": {
            str(status): _response(answer, endpoint) for status, answer in endpoint.answers.items()
        },
    }
    if endpoint.text:
        described["description"] = endpoint.text
    parameters = [
        *_path_parameters(endpoint),
        *_query_parameters(endpoint),
        *_condition_parameters(endpoint),
        *_scope_parameters(endpoint),
    ]
    if parameters:
        described["parameters"] = parameters
    if endpoint.body is not None and not endpoint.query_only:
        described["requestBody"] = _request_body(endpoint)
    is_probe = endpoint.path in PROBES
    if is_probe:
        described["security"] = [{}]
    always = tuple(status for status in ALWAYS if status != 401 or not is_probe)
    is_typed = endpoint.path.encode().startswith(TYPED_PATHS)
    # A header may be wrong, too.
    of_headers = (400,) if endpoint.scope_parts else ()
    for status in sorted({*endpoint.errors, *always, *of_headers}):
        name = f"typed-{status}" if is_typed and status in TYPED_ERRORS else str(status)
        described["responses"][str(status)] = {"$ref": f"#/components/responses/{name}"}
    return described


def _path_parameters(endpoint: Endpoint) -> list[Json]:
    known = plain_members(PathNames)
    parameters = []
    for name in re.findall(r"\{(\w+)\}", endpoint.path):
        schema = dict(known[name])
        text, (example,) = schema.pop("description"), schema.pop("examples")
        parameters.append(
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": schema,
                "description": f"{text} Percent-encoded.",
                "example": endpoint.path_examples.get(name, example),
            }
        )
    return parameters


def _query_parameters(endpoint: Endpoint) -> list[Json]:
    """Describes the members that a request may have in its query: beside its body, or instead of
    one."""
    return [
        _query_parameter(endpoint, name, dict(schema), name in required_members(shape))
        for shape in endpoint.query
        for name, schema in plain_members(shape).items()
    ]


def _query_parameter(endpoint: Endpoint, name: str, schema: Json, is_required: bool) -> Json:
    has_body = endpoint.body is not None and not endpoint.query_only
    takes_raw = any("raw" in shape.__struct_fields__ for shape in endpoint.query)
    text = schema.pop("description")
    if has_body and takes_raw and name != "raw":
        text += " Only with raw=true; otherwise the request is refused."
    elif has_body and not takes_raw:
        # It is not read beside a body, so any text is right.
        schema = {"type": "string"}
    parameter: Json = {"name": name, "in": "query", "schema": schema, "description": text}
    if not has_body:
        parameter["required"] = is_required
        if name in (endpoint.example or {}):
            parameter["example"] = endpoint.example[name]
    return parameter


def _condition_parameters(endpoint: Endpoint) -> list[Json]:
    return [
        {
            "name": name,
            "in": "header",
            "required": False,
            "schema": _ETAGS,
            "description": text,
        }
        for name, text in endpoint.conditions.items()
    ]


def _scope_parameters(endpoint: Endpoint) -> list[Json]:
    names = dict(zip(("tenant", "namespace"), SCOPE_HEADERS.values(), strict=True))
    # Rows of the journal are not in the default namespace because none is named.
    otherwise = "all of them" if endpoint.path == "/v1/journal" else "default"
    return [
        {
            "name": names[part],
            "in": "header",
            "required": False,
            "schema": {"type": "string", "pattern": rf"^\s*{NAME_PATTERN}\s*$"},
            "description": f"{_SCOPE_HEADERS[part]}, else {otherwise}.",
        }
        for part in endpoint.scope_parts
    ]


def _request_body(endpoint: Endpoint) -> Json:
    schema = ref(endpoint.body)
    if not endpoint.batch:
        if endpoint.or_array:
            schema = {"anyOf": [schema, _items(schema)]}
        content = {"application/json": {"schema": schema, "example": endpoint.example}}
        return {"required": bool(required_members(endpoint.body)), "content": content}
    lines = "\n".join(msgspec.json.encode(item).decode() for item in endpoint.example)
    return {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"anyOf": [_items(schema), _one_line(schema)]},
                "example": endpoint.example,
            },
            "application/x-ndjson": {"schema": {"type": "string"}, "example": lines},
        },
    }


def _items(schema: Json) -> Json:
    """An array of items that stand or fall alone: one that is wrong has an error as its result."""
    anything: Json = {"description": "Any other item is answered with its own error."}
    items = {"anyOf": [schema, anything]}
    return {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_BATCH_ITEMS}


def _one_line(schema: Json) -> Json:
    """The schema of NDJSON with one line. A body that is no array is NDJSON, whatever its content
    type."""
    return {"not": {"type": "array"}, "anyOf": [schema, {}]}


def _response(answer: Answer, endpoint: Endpoint) -> Json:
    response: Json = {"description": answer.text}
    if answer.headers:
        response["headers"] = {name: _header(*header) for name, header in answer.headers.items()}
    if answer.shape is not None:
        schema = ref(answer.shape)
        if endpoint.batch:
            results = {"type": "array", "items": {"anyOf": [schema, ref(BatchError)]}}
            schema = {"type": "object", "properties": {"results": results}}
        elif endpoint.or_array:
            # A publish with ack none has null for an answer, a publish_batch with per_message one
            # for each event.
            one = {"anyOf": [schema, ref(TypedErrorBody), {"type": "null"}]}
            several = {"type": "array", "items": one}
            schema = {"anyOf": [schema, {"type": "array", "items": {"anyOf": [one, several]}}]}
        response["content"] = {answer.media_type: {"schema": schema, "example": answer.example}}
    return response


def _error_response(status: int) -> Json:
    code, text, message = ERRORS[status]
    shape: type = ErrorBody
    example: Json = {"error": code, "message": message}
    response: Json = {"description": text}
    if status == 429:
        shape = OverloadBody
        example |= {"reason": "overloaded", "retry_after_ms": 1000, "limit": "partition_msgs"}
        response["headers"] = {"Retry-After": _header("Whole seconds.", "integer")}
    elif status == 405:
        response["headers"] = {"Allow": _header("The methods this path takes.", "string")}
    response["content"] = {"application/json": {"schema": ref(shape), "example": example}}
    return response


def _typed_response(status: int) -> Json:
    code, text, message = TYPED_ERRORS[status]
    example: Json = {"type": "error", "error": code, "message": message}
    if status == 429:
        example |= {
            "reason": "publish_queue_timeout",
            "retry_after_ms": 1000,
            "limit": "pub_queue_depth",
        }
    content = {"application/json": {"schema": ref(TypedErrorBody), "example": example}}
    return {"description": text, "content": content}


def _header(text: str, kind: str) -> Json:
    return {"description": text, "schema": {"type": kind}}


def _schemas() -> dict[str, Json]:
    requests = [each.body for each in ENDPOINTS if each.body is not None]
    messages = [each.shape for each in MESSAGES]
    answers = [answer.shape for each in ENDPOINTS for answer in each.answers.values()]
    errors = (ErrorBody, OverloadBody, TypedErrorBody, BatchError)
    return schemas_of([*requests, *messages], [*filter(None, answers), *errors])
