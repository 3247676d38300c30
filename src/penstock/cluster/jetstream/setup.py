"""Makes a cluster's streams and its bucket when they are absent, as the log needs them.

Names carry the cluster's name, and each stream's metadata the random id of its cluster, so that two
clusters on one account never mix. What somebody else made under such a name is refused, and never
changed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import TypeVar

import msgspec

from penstock.cluster.jetstream import api
from penstock.cluster.jetstream.api import ApiAnswer, JetStreamApi, JetStreamConfig, StreamInfo
from penstock.cluster.jetstream.connection import NoResponders, NotPermitted
from penstock.cluster.jetstream.errors import ClusterRefused
from penstock.cluster.shared import Unanswered

REPLICAS = 3
CLUSTER_ID = "penstock_cluster"
"""The metadata of the bucket and of every stream has the cluster's random id under this name."""
KEYS_BYTES = 64 * 1024 * 1024
PAUSE_S = 0.2
FIND_TIMEOUT_S = 1.0
MAKE_TIMEOUT_S = 10.0
PATIENCE_S = 5.0
"""How long servers may lack what they need, for they may have just started."""
IMPOSSIBLE_LAST = b"Nats-Expected-Last-Sequence: 9223372036854775807\r\n"
IMPOSSIBLE_LAST_OF_KEY = b"Nats-Expected-Last-Subject-Sequence: 9223372036854775807\r\n"
NOT_ENABLED = (
    "the NATS server {} has no JetStream, and no other server of its cluster answers for it: add "
    "`jetstream {{ store_dir: ..., sync_interval: always }}` to the configuration of the servers"
)
PERMISSIONS = (
    "Permit its user to publish to `$JS.API.>`, `$JS.FC.>`, `$KV.>` and `penstock.>`, and to "
    "subscribe to `_INBOX.>`"
)

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?")
A = TypeVar("A", bound=ApiAnswer)


class ClusterNames:
    """Names of what a cluster has on its NATS account. Raises ClusterRefused for a cluster name
    that does not fit everywhere."""

    def __init__(self, cluster: str) -> None:
        if not _NAME.fullmatch(cluster):
            raise ClusterRefused(
                f"the cluster's name {cluster!r} is not valid: 1 to 64 of a-z, 0-9 and -, with a "
                "letter or digit at both ends"
            )
        self.cluster = cluster

    @property
    def bucket(self) -> str:
        return f"penstock-{self.cluster}"

    @property
    def keys_stream(self) -> str:
        return f"KV_{self.bucket}"

    def stream(self, purpose: str) -> str:
        """`purpose` is unique in the cluster, such as `shard-3`."""
        return f"penstock-{self.cluster}_{purpose}"

    def subject(self, purpose: str, stream_id: str) -> str:
        return f"penstock.{self.cluster}.{purpose}.{stream_id}"


def stream_config(
    names: ClusterNames, purpose: str, cluster_id: str, max_bytes: int, replicas: int
) -> JetStreamConfig:
    """A log. It refuses what is over `max_bytes` (`discard: new`) rather than forget what nobody
    has sealed; nothing ages. Single messages cannot be deleted, which would leave holes; its
    beginning is purged. Direct reads are off: any replica answers those."""
    stream_id = secrets.token_hex(8)
    return JetStreamConfig(
        name=names.stream(purpose),
        subjects=(names.subject(purpose, stream_id),),
        discard="new",
        num_replicas=replicas,
        max_bytes=max_bytes,
        deny_delete=True,
        metadata={CLUSTER_ID: cluster_id, api.IDENTITY: stream_id},
    )


def pieces_config(
    names: ClusterNames, purpose: str, cluster_id: str, max_bytes: int, replicas: int
) -> JetStreamConfig:
    """Staged pieces: a subject for each part, which keeps its last message. What is over
    `max_bytes` is refused."""
    config = stream_config(names, purpose, cluster_id, max_bytes, replicas)
    subjects = (f"{config.subjects[0]}.>",)
    return msgspec.structs.replace(config, subjects=subjects, max_msgs_per_subject=1)


def bucket_config(names: ClusterNames, replicas: int) -> JetStreamConfig:
    """A bucket as tools for buckets expect it, but for direct reads."""
    return JetStreamConfig(
        name=names.keys_stream,
        subjects=(f"$KV.{names.bucket}.>",),
        discard="new",
        num_replicas=replicas,
        max_bytes=KEYS_BYTES,
        max_msgs_per_subject=1,
        deny_delete=True,
        allow_rollup_hdrs=True,
        metadata={CLUSTER_ID: secrets.token_hex(8), api.IDENTITY: secrets.token_hex(8)},
    )


async def find_or_make(
    stream_api: JetStreamApi, wanted: JetStreamConfig, accept: frozenset[str]
) -> StreamInfo:
    """Finds the stream of that name or makes it, with one replica only if that is accepted. Waits
    while JetStream has no leader. Raises ClusterRefused."""
    name = wanted.name
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = await ask_for(stream_api, StreamInfo, f"STREAM.INFO.{name}")
        if found.error is None:
            return found
        is_absent = found.error.err_code == api.STREAM_NOT_FOUND
        if not is_absent or time.monotonic() > deadline:
            raise ClusterRefused(f"the stream {name} cannot be used: {found.error}")
        made = await _make_patiently(stream_api, wanted)
        if _has_too_few_servers(made) and "replicas" in accept:
            made = await _make(stream_api, msgspec.structs.replace(wanted, num_replicas=1))
        if made.error is not None and made.error.err_code != api.NAME_IN_USE:
            raise ClusterRefused(*_explain(wanted, made.error))
        # Another broker may have been faster: then the stream has another id, and it may not be
        # there for a moment yet.


async def ask_for(stream_api: JetStreamApi, kind: type[A], name: str, body: object = None) -> A:
    """Asks until there is an answer: servers that have just started have no leader yet."""
    connection = stream_api.connection
    refusals = 0
    while True:
        await connection.connected()
        # While a stream is being made it has no leader, and nobody answers questions about it.
        timeout_s = FIND_TIMEOUT_S if body is None else MAKE_TIMEOUT_S
        answer = await stream_api.ask(kind, name, body, timeout_s)
        if not isinstance(answer, Unanswered):
            if answer.error is None or not _is_passing(answer.error):
                return answer
            reason = str(answer.error)
        else:
            reason = answer.reason
            check_permitted(answer)
            if isinstance(answer, NoResponders) and not connection.has_jetstream:
                refusals += 1
                if refusals * PAUSE_S >= PATIENCE_S:
                    raise ClusterRefused(NOT_ENABLED.format(connection.server))
        connection.say(f"NATS does not answer {name}: {reason}", of=name)
        await asyncio.sleep(PAUSE_S)


def check_permitted(answer: Unanswered) -> None:
    if isinstance(answer, NotPermitted):
        raise ClusterRefused(f"{answer.reason}. {PERMISSIONS}")


async def check_append(stream_api: JetStreamApi, subject: str, impossible: bytes) -> None:
    """Raises ClusterRefused if this user may not publish to the subject. Stores nothing: it asks to
    be stored behind a message that there never is."""
    while True:
        await stream_api.connection.connected()
        answer = await stream_api.connection.ask(subject.encode(), b"", headers=impossible)
        if not isinstance(answer, Unanswered):
            return
        check_permitted(answer)
        text = f"NATS does not answer {subject}: {answer.reason}"
        stream_api.connection.say(text, of=subject)
        await asyncio.sleep(PAUSE_S)


def _is_passing(error: api.ApiError) -> bool:
    """Whether the answer may be another one soon: servers that start have no leader yet."""
    if error.err_code in (api.JETSTREAM_NOT_ENABLED, api.JETSTREAM_NOT_ENABLED_FOR_ACCOUNT):
        raise ClusterRefused(
            f"{error}: the NATS account of this broker has no JetStream. Add `jetstream: enabled` "
            "to the account, or use another one"
        )
    return error.code == 503 and error.err_code != api.INSUFFICIENT_RESOURCES


async def _make_patiently(stream_api: JetStreamApi, wanted: JetStreamConfig) -> StreamInfo:
    """Servers that start at the same time do not all know each other yet."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        made = await _make(stream_api, wanted)
        error = made.error
        is_passing = (
            error is not None
            and error.err_code == api.NO_SUITABLE_PEERS
            and "insufficient" not in error.description
        )
        if not is_passing or time.monotonic() > deadline:
            return made
        text = f"NATS cannot make the stream {wanted.name} yet: {error}"
        stream_api.connection.say(text, of=wanted.name)
        await asyncio.sleep(PAUSE_S)


async def _make(stream_api: JetStreamApi, wanted: JetStreamConfig) -> StreamInfo:
    # What has its default is left out: an older server refuses a field that it does not know.
    plain = msgspec.to_builtins(JetStreamConfig())
    body = {k: v for k, v in msgspec.to_builtins(wanted).items() if v != plain[k]}
    body |= {"retention": wanted.retention, "storage": wanted.storage}
    return await ask_for(stream_api, StreamInfo, f"STREAM.CREATE.{wanted.name}", body)


def _has_too_few_servers(made: StreamInfo) -> bool:
    error = made.error
    return (
        error is not None
        and error.err_code in (api.NO_SUITABLE_PEERS, api.NOT_CLUSTERED)
        and "insufficient" not in error.description
    )


def _explain(wanted: JetStreamConfig, error: api.ApiError) -> tuple[str, str]:
    """Returns the refusal, and what the operator could accept instead."""
    if error.err_code == api.NOT_CLUSTERED or (
        error.err_code == api.NO_SUITABLE_PEERS and "insufficient" not in error.description
    ):
        return (
            f"JetStream cannot keep {wanted.num_replicas} replicas of {wanted.name}: {error}. Run "
            f"{wanted.num_replicas} servers with JetStream, or accept `replicas`: then what one "
            "server loses is lost",
            "replicas",
        )
    return (
        f"JetStream cannot make the stream {wanted.name} with {wanted.max_bytes} bytes: {error}. "
        "Its servers reserve that much on each disk: allow them more (max_file_store, or the "
        "account's limits), or use a smaller limit",
        "",
    )
