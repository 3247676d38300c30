"""The settings that all brokers of a cluster have in common.

Invariant: two live brokers that joined have the same agreement. Must not know what a setting means.
"""

from __future__ import annotations

import msgspec

CLUSTER_FORMAT = 1
"""The version of what brokers write for each other: messages of the stream, leases, announcements.
Brokers with different ones cannot work together."""

AGREEMENT_KEY = "agreement"

Setting = str | int | float | bool | None


class Agreement(msgspec.Struct, frozen=True):
    format: int
    settings: dict[str, Setting]

    def differences(self, other: Agreement) -> list[str]:
        """Says in words in what `other` differs."""
        if self.format != other.format:
            return [f"format {other.format} instead of {self.format}"]
        names = sorted(self.settings.keys() | other.settings.keys())
        return [
            f"{name} {_text(other, name)} instead of {_text(self, name)}"
            for name in names
            if self.settings.get(name) != other.settings.get(name)
        ]


def encode_agreement(agreement: Agreement) -> bytes:
    return msgspec.json.encode(agreement)


def decode_agreement(data: bytes) -> Agreement | None:
    """Returns None for a value that is no agreement."""
    try:
        return msgspec.json.decode(data, type=Agreement)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def _text(agreement: Agreement, name: str) -> str:
    return str(agreement.settings[name]) if name in agreement.settings else "not set"
