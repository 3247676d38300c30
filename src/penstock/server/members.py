"""Types and texts for the members of requests, from which the API's documents are made.

A struct says of each member what it means, what is allowed and whether it is required:

    topic: Annotated[Name | None, required("The topic's name.")] = None

Invariant: the broker accepts what these limits allow and refuses what they forbid, as far as a
schema can say it; the tests compare both with Schemathesis. The limits are for the documents only:
handlers check them, with their own error texts. The broker limits bytes of UTF-8 where a schema
counts characters, so it may refuse long texts that are not ASCII.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.model.limits import (
    MAX_BACKOFF_MS,
    MAX_CACHE_KEY_BYTES,
    MAX_ENVELOPE_FIELD_BYTES,
    MAX_LEASE_MS,
    MAX_NAME_BYTES,
    MAX_OFFSET,
    MAX_POSITION,
)

REQUIRED = "x-required"
"""Marks a required member in the schema that msgspec makes; the documents do not show it. The
structs have a default for such members, so that a missing one is refused in our own words."""


def optional(text: str) -> Meta:
    return Meta(description=text)


def required(text: str) -> Meta:
    return Meta(description=text, extra_json_schema={REQUIRED: True})


def limits(**keywords: Any) -> Meta:
    """Limits in the words of JSON Schema."""
    return Meta(extra_json_schema=keywords)


def decoded_later(shape: Any) -> Meta:
    """Describes a list that is decoded when it is used: the documents show this type for it."""
    return Meta(extra={"shape": shape})


class StrictBody(Struct, forbid_unknown_fields=True, gc=False):
    """Base of request bodies. `null` means absent, as it does for clients of the contract."""


CONTROL = r"\u0000-\u001f\u007f-\u009f"
_EDGE = rf"[^\s{CONTROL}]"
NAME_PATTERN = rf"(dlq\.)?{_EDGE}([^{CONTROL}]{{0,{MAX_NAME_BYTES - 2}}}{_EDGE})?"

Name = Annotated[str, limits(pattern=rf"^\s*{NAME_PATTERN}\s*$")]
NameOrEmpty = Annotated[str, limits(pattern=rf"^\s*({NAME_PATTERN}\s*)?$")]
Identifier = Annotated[str, limits(maxLength=MAX_ENVELOPE_FIELD_BYTES)]
Count = Annotated[int, limits(minimum=0, maximum=MAX_OFFSET)]
Position = Annotated[int, limits(minimum=0, maximum=MAX_POSITION)]
Wait = Annotated[int, limits(minimum=0, maximum=MAX_BACKOFF_MS)]
Lease = Annotated[int, limits(minimum=0, maximum=MAX_LEASE_MS)]
Base64 = Annotated[
    bytes, limits(pattern=r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")
]
CacheKey = Annotated[
    str, limits(minLength=1, maxLength=MAX_CACHE_KEY_BYTES, pattern=f"^[^{CONTROL}]*$")
]

TopicName = Annotated[Name | None, required("The topic's name: 1 to 200 bytes of UTF-8.")]
GroupName = Annotated[Name | None, required("The consumer group's name.")]
OwnerName = Annotated[
    Name | None,
    required("The consumer's name; whoever has the same name may settle its deliveries."),
]
LeaseTime = Annotated[
    Lease | None, optional("How long a lease lasts; 0 or omitted is the broker's default.")
]
