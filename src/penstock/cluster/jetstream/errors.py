"""Errors of the connection to NATS and of what is found there. They are for the operator.

NatsError
├── NatsAddressInvalid     the addresses of the servers cannot be read
├── NatsProtocolError      the server speaks something else, or a line is damaged
├── NatsConnectFailed      this server cannot be used now; another one may
└── ClusterRefused         what the servers promise, or what they hold, is not what was wanted

No message has a password or a token in it.
"""

from __future__ import annotations


class NatsError(Exception):
    """The root of the tree; never raised itself."""


class NatsAddressInvalid(NatsError):
    """The addresses of the NATS servers cannot be read."""


class NatsProtocolError(NatsError):
    """The other end does not speak the protocol of NATS."""


class NatsConnectFailed(NatsError):
    """A server is away, or refuses this client."""


class ClusterRefused(NatsError):
    """The broker does not start on these servers. `name` is what the operator can accept, empty if
    nothing can be accepted."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name
