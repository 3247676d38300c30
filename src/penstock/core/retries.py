"""When a message is tried again and when it is given up: pure functions of policy and attempts."""

from __future__ import annotations

from penstock.model.envelope import RetryPolicy
from penstock.model.limits import MAX_BACKOFF_MS


def backoff_ms(policy: RetryPolicy | None, attempts: int) -> int:
    """The wait before the retry that follows delivery number `attempts`; none without a policy."""
    if policy is None or not policy.backoff_ms:
        return 0
    cap = policy.max_backoff_ms or MAX_BACKOFF_MS
    # Past 48 doublings any backoff is over any cap; the bound keeps the shift small.
    return min(policy.backoff_ms << min(attempts - 1, 48), cap)


def is_last_attempt(policy: RetryPolicy | None, attempts: int) -> bool:
    return policy is not None and 0 < policy.max_attempts <= attempts
