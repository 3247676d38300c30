"""The OpenAPI 3.1 document of the API, made of the described operations and the wire's structs.

Invariant: a pure function of `operations`; nothing of a running broker is in it. Must not know
how it is shown.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from penstock import __version__
from penstock.server.answers import BatchError
from penstock.server.operations import OPERATIONS, Answer, Operation
from penstock.server.replies import ErrorBody, OverloadBody
from penstock.server.wire import EnvelopeBody

Json = dict[str, Any]

REF = "#/components/schemas/{name}"

ABOUT = (
    "A durable message broker. Most requests take a JSON body or, for trying things out, query "
    "parameters; a body is decoded strictly, and unknown members are refused. Every error has the "
    'shape {"error": CODE, "message": text}. An X-Request-Id is echoed, or made up.'
)
TAGS = {
    "Topics": "Topics, their partitions and their groups.",
    "Messages": "Produce, consume and settle.",
    "Effects": "Idempotency on the consumer's side: run a message's effect once for its key.",
    "Broker": "Probes and version.",
}
ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("INVALID_ARGUMENT", "The request is wrong.", "topic is required"),
    401: ("UNAUTHENTICATED", "No bearer token, or not the right one.", "a token is required"),
    403: ("PERMISSION_DENIED", "This Origin or Host may not speak to the broker.", "not allowed"),
    404: ("NOT_FOUND", "No such topic or group.", "no such topic: 'orders'"),
    405: ("METHOD_NOT_ALLOWED", "See the Allow header.", "this path takes POST"),
    409: ("FAILED_PRECONDITION", "The state does not allow it.", "not owner"),
    413: ("INVALID_ARGUMENT", "Something is over its limit.", "max_message_bytes is 8388608"),
    429: ("RESOURCE_EXHAUSTED", "A limit is reached; see Retry-After.", "the partition is full"),
    500: ("INTERNAL", "A defect of the broker.", "internal error; the broker's log says more"),
    503: ("UNAVAILABLE", "The log cannot be written, or the broker stops.", "the disk is full"),
}
ALWAYS = (401, 403, 405, 500)
PROBES = frozenset({"/v1/healthz", "/v1/livez", "/v1/readyz"})

FIELDS = {
    "topic": "The topic's name: 1 to 200 bytes of UTF-8.",
    "name": "The topic's name: 1 to 200 bytes of UTF-8.",
    "partitions": "How many partitions, 1 to 1,024; 1 when omitted.",
    "group": "The consumer group's name.",
    "owner": "Who consumes: the same name acks what it was given.",
    "key": "Messages of one key go to one partition.",
    "value": "The payload: a string that is not empty.",
    "partition": "The delivery's partition.",
    "offset": "The delivery's offset.",
    "delivery_id": "The delivery's fencing token: a later delivery is not meant.",
    "lease_ms": "How long a lease lasts; 0 or omitted is the broker's default.",
    "prefetch": "How many deliveries of this stream may be unfinished; 0 is no limit of its own.",
    "heartbeat_ms": "Sends a blank line so often; 0 is never.",
    "reason": "Why it failed; the next delivery's last_error.",
    "result": "What the effect came to, for those who ask later.",
    "retention_ms": "Finished messages are kept so long; 0 is for ever.",
    "retention_bytes": "Finished messages are kept up to so many bytes; 0 is all.",
    "run_id": "The workflow run.",
    "step_id": "The step of the run.",
    "parent_step_id": "The step that caused it.",
    "tenant_id": "The tenant; idempotency keys are its own.",
    "tenant": "The same as tenant_id.",
    "idempotency_key": "A second message with this key is not stored.",
    "idem_key": "The same as idempotency_key.",
    "target_topic": "Stores the message in this topic instead.",
    "partition_override": "Stores the message in this partition.",
    "deadline": "RFC 3339 with a zone; a produce after it is refused.",
    "deadline_rfc3339": "The same as deadline.",
    "deadline_ms": "The same in milliseconds since 1970.",
    "max_attempts": "Deliveries before the message is dead-lettered; 0 is no limit.",
    "backoff_ms": "The wait before the first retry; it doubles.",
    "max_backoff_ms": "The longest wait; 0 is a day.",
    "retry_max_attempts": "retry_policy.max_attempts.",
    "retry_backoff_ms": "retry_policy.backoff_ms.",
    "retry_max_backoff_ms": "retry_policy.max_backoff_ms.",
}
EFFECT_KEY = "The idempotency key of the effect."


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
            "responses": {str(status): _error_response(status) for status in ERRORS},
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
            str(status): _response(answer, operation.batch)
            for status, answer in operation.answers.items()
        },
    }
    if operation.text:
        described["description"] = operation.text
    parameters = _path_parameters(operation) + _query_parameters(operation)
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None and not operation.query_only:
        described["requestBody"] = _request_body(operation)
    is_probe = operation.path in PROBES
    if is_probe:
        described["security"] = [{}]
    always = tuple(status for status in ALWAYS if status != 401 or not is_probe)
    for status in sorted({*operation.errors, *always}):
        described["responses"][str(status)] = {"$ref": f"#/components/responses/{status}"}
    return described


def _path_parameters(operation: Operation) -> list[Json]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "description": f"{FIELDS[name]} Percent-encoded.",
            "example": {"topic": "orders", "group": "billing"}[name],
        }
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]


def _query_parameters(operation: Operation) -> list[Json]:
    """What a request without a body may say in its query instead."""
    if operation.body is None or operation.batch:
        return []
    names = operation.query or operation.body.__struct_fields__
    return [_query_parameter(operation, name) for name in names]


def _query_parameter(operation: Operation, name: str) -> Json:
    is_number = name.endswith(("_ms", "_bytes", "_attempts", "_override")) or name in (
        "partition",
        "partitions",
        "offset",
        "prefetch",
    )
    parameter: Json = {
        "name": name,
        "in": "query",
        "schema": {"type": "integer" if is_number else "string"},
        "description": _field_text(operation, name),
    }
    if operation.query_only:
        parameter["required"] = name in operation.required
        if name in operation.example:
            parameter["example"] = operation.example[name]
    return parameter


def _field_text(operation: Operation, name: str) -> str:
    if name == "key" and operation.tag == "Effects":
        return EFFECT_KEY
    return FIELDS[name]


def _request_body(operation: Operation) -> Json:
    schema = _ref(operation.body)
    if not operation.batch:
        content = {"application/json": {"schema": schema, "example": operation.example}}
        return {"content": content}
    lines = "\n".join(msgspec.json.encode(item).decode() for item in operation.example)
    return {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"type": "array", "items": schema, "minItems": 1, "maxItems": 10_000},
                "example": operation.example,
            },
            "application/x-ndjson": {"schema": {"type": "string"}, "example": lines},
        },
    }


def _response(answer: Answer, is_batch: bool) -> Json:
    response: Json = {"description": answer.text}
    if answer.shape is not None:
        schema = _ref(answer.shape)
        if is_batch:
            results = {"type": "array", "items": {"anyOf": [schema, _ref(BatchError)]}}
            schema = {"type": "object", "properties": {"results": results}}
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
    response["content"] = {"application/json": {"schema": _ref(shape), "example": example}}
    return response


def _ref(shape: Any) -> Json:
    return {"$ref": REF.format(name=shape.__name__)}


def _header(text: str, kind: str) -> Json:
    return {"description": text, "schema": {"type": kind}}


def _schemas() -> dict[str, Json]:
    """The structs' schemas; of request bodies, null is left out and what is required put in."""
    bodies = {each.body: each for each in OPERATIONS if each.body is not None}
    answers = [answer.shape for each in OPERATIONS for answer in each.answers.values()]
    shapes = [*bodies, *filter(None, answers), ErrorBody, OverloadBody, BatchError]
    _, schemas = msgspec.json.schema_components(shapes, ref_template=REF)
    for body, operation in bodies.items():
        _describe(schemas[body.__name__], operation)
        if operation.required:
            schemas[body.__name__]["required"] = list(operation.required)
    for name in (EnvelopeBody.__name__, "RetryPolicyBody"):
        _describe(schemas[name], None)
    return schemas


def _describe(schema: Json, operation: Operation | None) -> None:
    for name, member in schema["properties"].items():
        kinds = [kind for kind in member.pop("anyOf", []) if kind != {"type": "null"}]
        member.pop("default", None)
        member.update(kinds[0] if kinds else {})
        text = FIELDS.get(name) if operation is None else _text_or_none(operation, name)
        if text:
            member["description"] = text


def _text_or_none(operation: Operation, name: str) -> str | None:
    return _field_text(operation, name) if name in FIELDS else None
