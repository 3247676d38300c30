"""Describes a stream and the servers that keep it, for people. Must not know what it holds."""

from __future__ import annotations

from penstock.api.cluster import LogReport, LogServer
from penstock.api.outcomes import Done
from penstock.cluster.jetstream.api import JetStreamApi, PeerReport, StreamInfo
from penstock.cluster.jetstream.connection import NatsConnection
from penstock.cluster.shared import Unanswered
from penstock.model.errors import Unavailable

REPORT_TIMEOUT_S = 2.0


def describe_stream(connection: NatsConnection, name: str, done: Done[LogReport]) -> None:
    """Gives Unavailable if the stream has no leader, or NATS does not answer."""

    def answered(answer: StreamInfo | Unanswered) -> None:
        if isinstance(answer, Unanswered):
            done(Unavailable(f"NATS does not answer: {answer.reason}"))
        elif answer.error is not None:
            done(Unavailable(f"NATS cannot describe the stream {name}: {answer.error}"))
        else:
            done(_report(answer))

    JetStreamApi(connection).call(
        StreamInfo, f"STREAM.INFO.{name}", None, answered, REPORT_TIMEOUT_S
    )


def _report(answer: StreamInfo) -> LogReport:
    bounds, servers = answer.bounds(), []
    if answer.cluster is not None:
        if answer.cluster.leader:
            servers.append(LogServer(answer.cluster.leader, "leader", "current"))
        servers += [_follower(each) for each in answer.cluster.replicas]
    return LogReport(
        name=answer.config.name,
        first=bounds.first_seq,
        last=bounds.last_seq,
        bytes=answer.state.bytes,
        max_bytes=answer.config.max_bytes,
        servers=servers,
    )


def _follower(peer: PeerReport) -> LogServer:
    if peer.offline:
        return LogServer(peer.name, "follower", "offline", peer.lag)
    return LogServer(peer.name, "follower", "current" if peer.current else "behind", peer.lag)
