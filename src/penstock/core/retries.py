"""When a message is tried again and when it is given up: pure functions of policy and attempts.

Must not know timers or the state of a group.
"""

from __future__ import annotations

from penstock.core.topics import Topic
from penstock.model.envelope import RetryPolicy
from penstock.model.limits import MAX_BACKOFF_MS, Limits


def backoff_ms(policy: RetryPolicy | None, attempts: int) -> int:
    """Returns the policy's wait after delivery number `attempts`, or 0 without a policy."""
    if policy is None or not policy.backoff_ms:
        return 0
    return _doubled(policy.backoff_ms, policy.max_backoff_ms or MAX_BACKOFF_MS, attempts)


def default_backoff_ms(topic: Topic, limits: Limits, attempts: int) -> int:
    """Returns the wait after a nack of a message without a policy, from the settings of the topic
    or else of the broker."""
    first = topic.retry_backoff_ms or limits.retry_backoff_ms
    longest = topic.retry_max_backoff_ms or limits.retry_max_backoff_ms
    return _doubled(first, max(first, longest), attempts)


def is_last_attempt(topic: Topic, policy: RetryPolicy | None, attempts: int) -> bool:
    """Returns True if delivery number `attempts` was the last. The policy's `max_attempts` goes
    before the topic's. A dead-letter topic never gives up."""
    own = policy.max_attempts if policy is not None else 0
    return 0 < (own or topic.max_attempts) <= attempts and not topic.is_dead_letter


def _doubled(first_ms: int, longest_ms: int, attempts: int) -> int:
    # After 48 doublings any backoff exceeds any cap. The bound keeps the shift small.
    return min(first_ms << min(attempts - 1, 48), longest_ms)
