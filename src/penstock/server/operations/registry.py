"""The registry as a whole, for those who follow it, described."""

from __future__ import annotations

from penstock.server.answers import RegistryAnswer
from penstock.server.operations.endpoint import Answer, Operation
from penstock.server.registry.mirror import RemoteChanges, RemoteSnapshot

_AT = {"epoch": 1_767_225_600_000, "revision": 5}
_WHO = {"instance": "c5023744d4f661f0", "follows": []}
_TENANT = {
    "kind": "tenant",
    "tenant_id": "acme",
    "id": 5,
    "revision": 5,
    "created_ms": 1_767_225_600_000,
}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET",
        path="/v1/registry",
        tag="Registry",
        summary="Whose registry this is, and where it stands",
        text="A follower also says of whom, and how following goes.",
        answers={
            200: Answer(
                "Its role and revision.",
                RegistryAnswer,
                {"role": "own", "instance": _WHO["instance"], **_AT},
            )
        },
        errors=(503,),
    ),
    Operation(
        method="GET",
        path="/v1/registry/snapshot",
        tag="Registry",
        summary="All entries at one revision",
        answers={
            200: Answer(
                "Parents before what is in them.",
                RemoteSnapshot,
                {**_WHO, **_AT, "entries": [_TENANT]},
            )
        },
        errors=(503,),
    ),
    Operation(
        method="GET",
        path="/v1/registry/changes",
        tag="Registry",
        summary="What changed after a revision",
        text="410 when that is too long ago (10,000 changes are kept, and none over a restart from "
        "a snapshot) or of another epoch: take a snapshot. 416 when it is to come.",
        query=("since", "epoch"),
        required=("since",),
        example={"since": 4},
        answers={
            200: Answer(
                "The changes, in order.",
                RemoteChanges,
                {
                    **_WHO,
                    **_AT,
                    "changes": [{"revision": 5, "entry": _TENANT, "deleted": False}],
                },
            )
        },
        errors=(400, 410, 416, 503),
    ),
)
