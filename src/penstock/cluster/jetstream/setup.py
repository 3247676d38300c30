"""Makes a cluster's streams and its bucket when they are absent, as the log needs them.

Names carry the cluster's name, and each stream's metadata the random id of its cluster, so that two
clusters on one account never mix. What somebody else made under such a name is refused, and never
changed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import TypeVar

import msgspec

from penstock.cluster.jetstream import api
from penstock.cluster.jetstream.api import ApiAnswer, JetStreamApi, StreamAnswer, StreamConfig
from penstock.cluster.jetstream.errors import ClusterRefused
from penstock.cluster.shared import Unanswered

REPLICAS = 3
CLUSTER_ID = "penstock_cluster"
"""The metadata of the bucket and of every stream has the cluster's random id under this name."""
KEYS_BYTES = 64 * 1024 * 1024
PAUSE_S = 0.2

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
) -> StreamConfig:
    """A log. It refuses what is over `max_bytes` (`discard: new`) rather than forget what nobody
    has sealed; nothing ages. Single messages cannot be deleted, which would leave holes; its
    beginning is purged. Direct reads are off: any replica answers those."""
    stream_id = secrets.token_hex(8)
    return StreamConfig(
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
) -> StreamConfig:
    """Staged pieces: a subject for each part, which keeps its last message. What is over
    `max_bytes` is refused."""
    config = stream_config(names, purpose, cluster_id, max_bytes, replicas)
    subjects = (f"{config.subjects[0]}.>",)
    return msgspec.structs.replace(config, subjects=subjects, max_msgs_per_subject=1)


def bucket_config(names: ClusterNames, replicas: int) -> StreamConfig:
    """A bucket as tools for buckets expect it, but for direct reads."""
    return StreamConfig(
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
    stream_api: JetStreamApi, wanted: StreamConfig, accept: frozenset[str]
) -> StreamAnswer:
    """Finds the stream of that name or makes it, with one replica only if that is accepted. Waits
    while JetStream has no leader. Raises ClusterRefused."""
    name = wanted.name
    found = await ask_for(stream_api, StreamAnswer, f"STREAM.INFO.{name}")
    if found.error is not None and found.error.err_code == api.STREAM_NOT_FOUND:
        made = await _make(stream_api, wanted)
        if _has_too_few_servers(made) and "replicas" in accept:
            made = await _make(stream_api, msgspec.structs.replace(wanted, num_replicas=1))
        if made.error is not None and made.error.err_code != api.NAME_IN_USE:
            raise ClusterRefused(*_explain(wanted, made.error))
        # Another broker may have been faster: then the stream has another id.
        found = await ask_for(stream_api, StreamAnswer, f"STREAM.INFO.{name}")
    if found.error is not None:
        raise ClusterRefused(f"the stream {name} cannot be used: {found.error}")
    return found


async def ask_for(stream_api: JetStreamApi, kind: type[A], name: str, body: object = None) -> A:
    """Asks until there is an answer: servers that have just started have no leader yet."""
    while True:
        await stream_api.connection.connected()
        answer = await stream_api.ask(kind, name, body)
        if isinstance(answer, Unanswered):
            reason = answer.reason
        elif answer.error is not None and answer.error.code == 503:
            reason = str(answer.error)
        else:
            return answer
        stream_api.connection.say(f"NATS does not answer {name}: {reason}", of=name)
        await asyncio.sleep(PAUSE_S)


async def _make(stream_api: JetStreamApi, wanted: StreamConfig) -> StreamAnswer:
    # What has its default is left out: an older server refuses a field that it does not know.
    plain = msgspec.to_builtins(StreamConfig())
    body = {k: v for k, v in msgspec.to_builtins(wanted).items() if v != plain[k]}
    body |= {"retention": wanted.retention, "storage": wanted.storage}
    return await ask_for(stream_api, StreamAnswer, f"STREAM.CREATE.{wanted.name}", body)


def _has_too_few_servers(made: StreamAnswer) -> bool:
    error = made.error
    return (
        error is not None
        and error.err_code in (api.NO_SUITABLE_PEERS, api.NOT_CLUSTERED)
        and "insufficient" not in error.description
    )


def _explain(wanted: StreamConfig, error: api.ApiError) -> tuple[str, str]:
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
        "Its servers reserve that much on each disk: allow them more (max_file_store), or use a "
        "smaller limit",
        "",
    )
