"""The wire's structs as JSON schemas, for the documents.

Of a request, members are described and limited, and what is required is said, since the structs
leave that to who reads them. `null` means absent, so it is left out where a member is required.
Lists that the wire leaves undecoded are shown as what is made of them. Must not know routes, nor
who sends what.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from penstock.server.operations.constraints import constrain
from penstock.server.websocket.messages import TxnCheck, TxnDelete, TxnIncr, TxnPut

Json = dict[str, Any]

REF = "#/components/schemas/{name}"

LISTS: dict[str, Any] = {
    "payloads": list[bytes],
    "invalidate": list[str],
    "keys": list[str],
    "checks": list[TxnCheck],
    "ops": list[TxnPut | TxnDelete | TxnIncr],
    "include": list[Literal["expire", "evict"]],
}
"""What the lists hold that the wire leaves undecoded until they are used."""

_PARTS = {
    "TxnCheck": ("key",),
    "TxnPut": ("op", "key", "value"),
    "TxnDelete": ("op", "key"),
    "TxnIncr": ("op", "key"),
    "PartBody": ("part", "pieces", "rows"),
    "ReachedBody": ("partition", "next"),
}
"""Parts of a request, and what is required in them."""


class RequestShape(msgspec.Struct, frozen=True):
    """A struct that is decoded; `texts` say what its members mean, `rules` how they are limited."""

    shape: Any
    required: tuple[str, ...]
    texts: Mapping[str, str]
    rules: Mapping[str, Json]


def ref(shape: Any) -> Json:
    """One shape, or one of several."""
    several = get_args(shape)
    if not several:
        return {"$ref": REF.format(name=shape.__name__)}
    return {"oneOf": [ref(each) for each in several]}


def schemas_of(requests: Sequence[RequestShape], answers: Iterable[Any]) -> dict[str, Json]:
    """By the structs' names, with all that they refer to."""
    asked = [_shown(request.shape) for request in requests]
    answered = [one for shape in answers for one in get_args(shape) or (shape,)]
    _, schemas = msgspec.json.schema_components([*asked, *answered], ref_template=REF)
    for request in requests:
        _describe(schemas, request.shape.__name__, request)
    return schemas


def _describe(schemas: dict[str, Json], name: str, request: RequestShape) -> None:
    """Describes and limits the schema's members, and those of its parts."""
    schema = schemas[name]
    required = _PARTS.get(name, request.required if name == request.shape.__name__ else ())
    if required:
        schema["required"] = list(required)
    for member_name, member in schema["properties"].items():
        member.pop("default", None)
        kinds = member.pop("anyOf", [])
        if member_name in required:
            kinds = [kind for kind in kinds if kind != {"type": "null"}]
        if len(kinds) == 1:
            member.update(kinds[0])
        elif kinds:
            member["anyOf"] = kinds
        if member_name in request.texts:
            member["description"] = request.texts[member_name]
        constrain(member, request.rules.get(member_name, {}))
        # Each of several says itself which it is, and AsyncAPI means something else by the word.
        for each in _alternatives(member):
            each.pop("discriminator", None)
        for part in _names_in(member):
            _describe(schemas, part, request)


def _alternatives(schema: Json) -> list[Json]:
    """The schema, or those that it has one of; of lists, the schemas of their items too."""
    found = [schema]
    for each in schema.get("anyOf") or schema.get("oneOf") or ():
        found += _alternatives(each)
    if "items" in schema:
        found += _alternatives(schema["items"])
    return found


def _names_in(schema: Json) -> list[str]:
    """The schemas that a member is, or is a list of."""
    return [each["$ref"].rsplit("/", 1)[1] for each in _alternatives(schema) if "$ref" in each]


def _shown(shape: Any) -> Any:
    """The same struct, with its undecoded lists as what they hold."""
    fields = msgspec.structs.fields(shape)
    if not any(field.type is msgspec.Raw for field in fields):
        return shape
    config = shape.__struct_config__
    return msgspec.defstruct(
        shape.__name__,
        [
            (field.name, LISTS[field.name] | None, None)
            if field.type is msgspec.Raw
            else (field.name, field.type, field.default)
            for field in fields
        ],
        tag_field=config.tag_field,
        tag=config.tag,
        forbid_unknown_fields=config.forbid_unknown_fields,
        kw_only=True,
        namespace={"__doc__": shape.__doc__},
    )
