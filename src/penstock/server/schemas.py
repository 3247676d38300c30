"""The wire's structs as JSON schemas, for the documents.

Of a request, members are described, `null` is left out where it only means absent, and what is
required is said, since the structs leave that to who reads them. Lists that the wire leaves
undecoded are shown as what is made of them. Must not know routes, nor who sends what.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from penstock.server.felix.messages import TxnCheck, TxnDelete, TxnIncr, TxnPut

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
}
"""Parts of a request, and what is required in them."""


class RequestShape(msgspec.Struct, frozen=True):
    """A struct that is decoded; `texts` say what its members mean."""

    shape: Any
    required: tuple[str, ...]
    texts: Mapping[str, str]


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
        _describe(schemas, request.shape.__name__, request.texts, request.required)
    return schemas


def _describe(
    schemas: dict[str, Json], name: str, texts: Mapping[str, str], required: tuple[str, ...]
) -> None:
    """The schema's members, and those of its parts."""
    schema = schemas[name]
    if required:
        schema["required"] = list(required)
    for member_name, member in schema["properties"].items():
        kinds = member.pop("anyOf", [])
        if "default" in member:
            del member["default"]
            kinds = [kind for kind in kinds if kind != {"type": "null"}]
        if len(kinds) == 1:
            member.update(kinds[0])
        elif kinds:
            member["anyOf"] = kinds
        if member_name in texts:
            member["description"] = texts[member_name]
        # Each of several says itself which it is, and AsyncAPI means something else by the word.
        member.get("items", member).pop("discriminator", None)
        for part in _names_in(member):
            _describe(schemas, part, texts, _PARTS.get(part, ()))


def _names_in(schema: Json) -> list[str]:
    """The schemas that a member is, or is a list of."""
    inner = schema.get("items", schema)
    choices = inner.get("anyOf") or inner.get("oneOf") or [inner]
    return [each["$ref"].rsplit("/", 1)[1] for each in choices if "$ref" in each]


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
