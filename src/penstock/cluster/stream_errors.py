"""Faults that a broker finds in the stream, each with what an operator can do about it."""

from __future__ import annotations

from penstock.model.errors import Unavailable


class StreamCutShort(Unavailable):
    """The stream has lost messages that it had confirmed. `holder` is a broker that has them."""

    def __init__(self, seq: int, holder: str = "") -> None:
        who = f"; broker {holder} has it, and must run to append it again" if holder else ""
        super().__init__(
            f"the shared stream ends before message {seq - 1}, which it had stored; "
            f"nothing is written until it is repaired{who}"
        )


class StreamHoldsOthers(Unavailable):
    """The stream has another message where this broker has one."""

    def __init__(self, seq: int) -> None:
        super().__init__(
            f"message {seq} of the cluster's stream is not frame {seq} of this broker's data "
            "directory: the directory belongs to another cluster, or the stream lost its end and "
            "others were written there. This broker serves nothing. If the other brokers have what "
            "you need, stop this one, move its data directory away and start it: it copies theirs. "
            "If not, stop them all first: this directory may be the only one with some messages"
        )


class StreamReplaced(Unavailable):
    """Somebody deleted the stream and made another one."""

    def __init__(self) -> None:
        super().__init__(
            "the cluster's stream is not the one that this data directory is a copy of: it was "
            "deleted and made anew. Nothing is written. Stop all brokers. Bring the stream back "
            "from a backup of NATS, and the brokers append what it lacks; or give the cluster "
            "another cluster_name. To give up what the brokers have, move their data directories "
            "away"
        )
