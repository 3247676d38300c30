"""The memory that a message takes, counted from what it holds.

Invariant: every text of a message is counted, in its key and value, envelope and routing. The
result depends on the message alone, so that what was added for it can be taken off again. The
constants are in model/limits.py; they were fitted to the resident memory of a real process.
"""

from __future__ import annotations

from sys import getsizeof

from penstock.model.envelope import Envelope, Routing
from penstock.model.limits import (
    DEAD_LETTER_BYTES,
    ENVELOPE_BYTES,
    MESSAGE_BYTES,
    META_ENTRY_BYTES,
    RETRY_POLICY_BYTES,
    ROUTING_BYTES,
    TEXT_BYTES,
)
from penstock.model.records import Stored

_PLAIN_BYTES = MESSAGE_BYTES + 2 * TEXT_BYTES

# A new text: Python may share one of a single character, with its UTF-8 already attached.
_WIDE_HEADER_BYTES = getsizeof("".join(("\xe8", "\xe9"))) - 3
"""Header of a text that is not ASCII; 1, 2 or 4 bytes for each character and one more follow."""


def held_bytes(message: Stored, size: int) -> int:
    """The bytes that `message` takes in memory; `size` is its key and value in UTF-8."""
    key, value = message.key, message.value
    if size == len(key) + len(value) or isinstance(value, bytes):
        nbytes = size + _PLAIN_BYTES
    else:
        nbytes = MESSAGE_BYTES + _text_bytes(key) + _text_bytes(value)
    if message.envelope is not None:
        nbytes += _envelope_bytes(message.envelope)
    if message.routing is not None:
        nbytes += _routing_bytes(message.routing)
    return nbytes


def _text_bytes(text: str) -> int:
    if text.isascii():
        return len(text) + TEXT_BYTES
    return _wide_bytes(text, len(text.encode()))


def _wide_bytes(text: str, utf8_bytes: int) -> int:
    """Returns the bytes of a text that is not ASCII. It also keeps its UTF-8 once it was encoded,
    which happens to every message; `getsizeof` includes that only from then on."""
    found = getsizeof(text)
    for width in (1, 2, 4):
        plain = _WIDE_HEADER_BYTES + width * (len(text) + 1)
        if found in (plain, plain + utf8_bytes + 1):
            break
    return plain + utf8_bytes + TEXT_BYTES


def _envelope_bytes(envelope: Envelope) -> int:
    nbytes = ENVELOPE_BYTES
    for text in (
        envelope.run_id,
        envelope.step_id,
        envelope.parent_step_id,
        envelope.tenant_id,
        envelope.idempotency_key,
        envelope.target_topic,
        envelope.deadline,
    ):
        if text:
            nbytes += len(text) + TEXT_BYTES if text.isascii() else _text_bytes(text)
    if envelope.retry_policy is not None:
        nbytes += RETRY_POLICY_BYTES
    letter = envelope.dlq
    if letter is not None:
        nbytes += DEAD_LETTER_BYTES
        for text in (letter.original_topic, letter.group, letter.last_error):
            nbytes += _text_bytes(text)
    return nbytes


def _routing_bytes(routing: Routing) -> int:
    nbytes = ROUTING_BYTES + _text_bytes(routing.label)
    for name, value in routing.meta.items():
        nbytes += META_ENTRY_BYTES + _text_bytes(name) + _text_bytes(value)
    return nbytes
