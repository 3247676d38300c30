"""The OpenAPI 3.1 document of the API, made of the described operations and the wire's structs.

Invariant: a pure function of `operations`; nothing of a running broker is in it. Must not know
how it is shown.
"""

from __future__ import annotations

import re
from typing import get_args

import msgspec

from penstock import __version__
from penstock.model.limits import MAX_BATCH_ITEMS
from penstock.server.batches import BatchError
from penstock.server.http.responses import TYPED_PATHS, ErrorBody, OverloadBody, TypedErrorBody
from penstock.server.operations import OPERATIONS, TAGS, Answer, Operation
from penstock.server.operations.constraints import ETAGS, constrain, rules_of
from penstock.server.operations.fields import kind_of, texts_of
from penstock.server.operations.schemas import Json, RequestShape, ref, schemas_of
from penstock.server.operations.socket import ASKED

ABOUT = (
    "A durable message broker. Most requests take a JSON body or, for trying things out, query "
    "parameters; those of streams, caches and tenants take JSON. A body is decoded strictly, and "
    'unknown members are refused. Every error has the shape {"error": CODE, "message": text}. An '
    "X-Request-Id is echoed, or made up."
)
ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("INVALID_ARGUMENT", "The request is wrong.", "topic is required"),
    401: ("UNAUTHENTICATED", "No bearer token, or not the right one.", "a token is required"),
    403: ("PERMISSION_DENIED", "This Origin or Host may not speak to the broker.", "not allowed"),
    404: ("NOT_FOUND", "No such topic or group.", "no such topic: 'orders'"),
    405: ("METHOD_NOT_ALLOWED", "See the Allow header.", "this path takes POST"),
    409: ("FAILED_PRECONDITION", "The state does not allow it.", "not owner"),
    410: ("OUT_OF_RANGE", "It is no longer kept.", "offsets below 500 are no longer kept"),
    413: ("INVALID_ARGUMENT", "Something is over its limit.", "max_message_bytes is 8388608"),
    416: ("OUT_OF_RANGE", "It is to come.", "the partition ends at offset 13; 20 was asked for"),
    429: ("RESOURCE_EXHAUSTED", "A limit is reached; see Retry-After.", "the partition is full"),
    500: ("INTERNAL", "A defect of the broker.", "internal error; the broker's log says more"),
    503: ("UNAVAILABLE", "The log cannot be written, or the broker stops.", "the disk is full"),
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
        "It is there, and was asked not to be; or (FAILED_PRECONDITION) the state does not allow "
        "it: not empty, not a number, cannot change.",
        "key 'greeting' exists with version 1767225600000001",
    ),
    410: (
        "OUT_OF_RANGE",
        "The changes are no longer kept; take a snapshot.",
        "changes after revision 3 are no longer kept; take a snapshot",
    ),
    412: (
        "FAILED_PRECONDITION",
        "What was read has changed since; nothing was done.",
        "key 'greeting' has version 1767225600000002, not 1767225600000001",
    ),
    413: ERRORS[413],
    416: (
        "OUT_OF_RANGE",
        "The revision is to come.",
        "revision 9 is to come; the registry is at 5",
    ),
    426: (
        "INVALID_ARGUMENT",
        "Only a WebSocket is spoken here.",
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
        "The log cannot be written, the control plane is away, or the broker stops.",
        "the control plane cannot be reached; nothing was changed",
    ),
}
"""Of streams, caches and the registry, where an error has a `type`."""

PATH_EXAMPLES = {
    "topic": "orders",
    "group": "billing",
    "partition": "0",
    "producer": "nightly",
    "batch": "7",
    "part": "0",
    "piece": "0",
    "tenant_id": "default",
    "namespace": "default",
    "stream": "default",
    "cache": "default",
    "key": "greeting",
}


def build_document() -> Json:
    schemas = _schemas()
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        path = paths.setdefault(operation.path, {})
        path[operation.method.lower()] = _operation(operation)
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


def _operation(operation: Operation) -> Json:
    words = re.findall(r"[a-z]+", operation.path.removeprefix("/v1"))
    described: Json = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": "_".join([operation.method.lower(), *words]),
        "responses": {
            str(status): _response(answer, operation)
            for status, answer in operation.answers.items()
        },
    }
    if operation.text:
        described["description"] = operation.text
    parameters = [
        *_path_parameters(operation),
        *_query_parameters(operation),
        *_condition_parameters(operation),
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None and not operation.query_only:
        described["requestBody"] = _request_body(operation)
    is_probe = operation.path in PROBES
    if is_probe:
        described["security"] = [{}]
    always = tuple(status for status in ALWAYS if status != 401 or not is_probe)
    is_typed = operation.path.encode().startswith(TYPED_PATHS)
    for status in sorted({*operation.errors, *always}):
        name = f"typed-{status}" if is_typed and status in TYPED_ERRORS else str(status)
        described["responses"][str(status)] = {"$ref": f"#/components/responses/{name}"}
    return described


def _path_parameters(operation: Operation) -> list[Json]:
    texts = texts_of(operation.tag)
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": _parameter_schema(operation, name, "path"),
            "description": f"{texts[name]} Percent-encoded.",
            "example": operation.names.get(name, PATH_EXAMPLES[name]),
        }
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]


def _parameter_schema(operation: Operation, name: str, where: str) -> Json:
    """The schema of a path or query parameter. A query beside a body is not read, except by the
    routes that take raw bodies."""
    is_beside_body = operation.body is not None and not operation.query_only
    if where == "query" and is_beside_body and not _takes_raw(operation):
        return {"type": "string"}
    schema: Json = {"type": kind_of(name)}
    constrain(schema, rules_of(operation.tag).get(name, {}))
    return schema


def _query_parameters(operation: Operation) -> list[Json]:
    """What a request may say in its query: beside its body, or instead of one."""
    names = operation.query
    if names is None:
        has_own = operation.body is None or operation.batch
        names = () if has_own else operation.body.__struct_fields__
    return [_query_parameter(operation, name) for name in names]


def _query_parameter(operation: Operation, name: str) -> Json:
    parameter: Json = {
        "name": name,
        "in": "query",
        "schema": _parameter_schema(operation, name, "query"),
        "description": texts_of(operation.tag)[name],
    }
    if operation.body is not None and _takes_raw(operation) and name != "raw":
        parameter["description"] += " Only with raw=true; otherwise the request is refused."
    if operation.query_only or operation.body is None:
        parameter["required"] = name in operation.required
        if name in (operation.example or {}):
            parameter["example"] = operation.example[name]
    return parameter


def _takes_raw(operation: Operation) -> bool:
    return "raw" in (operation.query or ())


def _condition_parameters(operation: Operation) -> list[Json]:
    return [
        {
            "name": name,
            "in": "header",
            "required": False,
            "schema": {"type": "string", **ETAGS},
            "description": text,
        }
        for name, text in operation.conditions.items()
    ]


def _request_body(operation: Operation) -> Json:
    schema = ref(operation.body)
    if not operation.batch:
        if operation.or_array:
            schema = {"anyOf": [schema, _items(schema)]}
        content = {"application/json": {"schema": schema, "example": operation.example}}
        return {"required": bool(operation.required), "content": content}
    lines = "\n".join(msgspec.json.encode(item).decode() for item in operation.example)
    return {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"anyOf": [_items(schema), _one_line(schema)]},
                "example": operation.example,
            },
            "application/x-ndjson": {"schema": {"type": "string"}, "example": lines},
        },
    }


def _items(schema: Json) -> Json:
    """An array of items that stand or fall alone: one that is wrong has an error as its result."""
    anything: Json = {"description": "Anything else is answered with an error of its own."}
    items = {"anyOf": [schema, anything]}
    return {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_BATCH_ITEMS}


def _one_line(schema: Json) -> Json:
    """A body that is no array is NDJSON, whatever its content type: this one has one line."""
    return {"not": {"type": "array"}, "anyOf": [schema, {}]}


def _response(answer: Answer, operation: Operation) -> Json:
    response: Json = {"description": answer.text}
    if answer.headers:
        response["headers"] = {name: _header(*header) for name, header in answer.headers.items()}
    if answer.shape is not None:
        schema = ref(answer.shape)
        if operation.batch:
            results = {"type": "array", "items": {"anyOf": [schema, ref(BatchError)]}}
            schema = {"type": "object", "properties": {"results": results}}
        elif operation.or_array:
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
    requests = {
        each.body: RequestShape(each.body, each.required, texts_of(each.tag), rules_of(each.tag))
        for each in OPERATIONS
        if each.body is not None and not get_args(each.body)
    }
    messages = [
        RequestShape(each.shape, each.required, texts_of("Streams"), rules_of("Streams"))
        for each in ASKED
    ]
    answers = [answer.shape for each in OPERATIONS for answer in each.answers.values()]
    errors = (ErrorBody, OverloadBody, TypedErrorBody, BatchError)
    return schemas_of([*requests.values(), *messages], [*filter(None, answers), *errors])
