"""JSON schemas of the structs that are decoded and sent, for the documents.

In a request, `null` means absent, so it is left out where a member is required. Lists that are
decoded later are shown as what they hold. Must not know endpoints, nor who sends what.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import msgspec

from penstock.server.members import REQUIRED

Json = dict[str, Any]

REF = "#/components/schemas/{name}"


def ref(shape: Any) -> Json:
    """One shape, or one of several."""
    several = get_args(shape)
    if not several:
        return {"$ref": REF.format(name=shape.__name__)}
    return {"oneOf": [ref(each) for each in several]}


def schemas_of(requests: Iterable[Any], answers: Iterable[Any]) -> dict[str, Json]:
    """Returns the schemas by the names of the structs, with all that they refer to."""
    asked = [_shown(one) for shape in requests for one in get_args(shape) or (shape,)]
    answered = [one for shape in answers for one in get_args(shape) or (shape,)]
    _, schemas = msgspec.json.schema_components([*asked, *answered], ref_template=REF)
    for shape in asked:
        _finish(schemas, shape.__name__)
    return schemas


@cache
def required_members(shape: Any) -> tuple[str, ...]:
    """The members that a request must have; of several shapes, those that all must have."""
    each = [schemas_of([one], ())[one.__name__]["required"] for one in get_args(shape) or (shape,)]
    return tuple(name for name in each[0] if all(name in names for names in each))


@cache
def plain_members(shape: Any) -> dict[str, Json]:
    """The schemas of the members that are one text, number or flag, as a query can have them."""
    members: dict[str, Json] = schemas_of([shape], ())[shape.__name__]["properties"]
    for member in members.values():
        kinds = [kind for kind in member.pop("anyOf", ()) if kind != {"type": "null"}]
        if len(kinds) == 1:
            member.update(kinds[0])
    kinds_of_plain = ("string", "integer", "boolean")
    return {name: each for name, each in members.items() if each.get("type") in kinds_of_plain}


def _finish(schemas: dict[str, Json], name: str) -> None:
    """Says which members of a request, and of its parts, are required."""
    schema = schemas[name]
    for member_name, member in schema["properties"].items():
        member.pop("default", None)
        if member.pop(REQUIRED, False):
            schema["required"].append(member_name)
        kinds = member.pop("anyOf", [])
        if member_name in schema["required"]:
            kinds = [kind for kind in kinds if kind != {"type": "null"}]
        if len(kinds) == 1:
            member.update(kinds[0])
        elif kinds:
            member["anyOf"] = kinds
        for each in _alternatives(member):
            # AsyncAPI means something else by the word, and each alternative names its own tag.
            each.pop("discriminator", None)
            if "$ref" in each:
                _finish(schemas, each["$ref"].rsplit("/", 1)[1])


def _alternatives(schema: Json) -> list[Json]:
    """The schema, its alternatives and, for lists, the schemas of their items."""
    found = [schema]
    for each in schema.get("anyOf") or schema.get("oneOf") or ():
        found += _alternatives(each)
    if "items" in schema:
        found += _alternatives(schema["items"])
    return found


@cache
def _shown(shape: Any) -> Any:
    """The same struct, with lists that are decoded later as what they hold."""
    fields = msgspec.structs.fields(shape)
    if not any(_is_raw(field.type) for field in fields):
        return shape
    config = shape.__struct_config__
    return msgspec.defstruct(
        shape.__name__,
        [
            (field.name, _decoded(field.type), None)
            if _is_raw(field.type)
            else (field.name, field.type, field.default)
            for field in fields
        ],
        tag_field=config.tag_field,
        tag=config.tag,
        forbid_unknown_fields=config.forbid_unknown_fields,
        kw_only=True,
        namespace={"__doc__": shape.__doc__},
    )


def _is_raw(kind: Any) -> bool:
    return get_origin(kind) is Annotated and get_args(kind)[0] is msgspec.Raw


def _decoded(kind: Any) -> Any:
    _, *metas = get_args(kind)
    shape = next(meta.extra["shape"] for meta in metas if meta.extra)
    return Annotated[(shape | None, *metas)]
