"""A rate limit that many processes share: a counter in a cache that expires with its window.

Run a broker, and this:

    penstock serve
    python rate_limit.py

It prints

    request 1 of ada: allowed
    request 2 of ada: allowed
    request 3 of ada: allowed
    request 4 of ada: refused
    request 1 of bob: allowed
    two seconds later: allowed

The first request of a window creates the counter with its TTL; later requests only increment it.
When the counter expires, the next request begins a new window.
"""

from __future__ import annotations

import time

from penstock.client import CacheHandle, Client

CACHE = "rates"
LIMIT = 3
WINDOW_MS = 2000


def is_allowed(rates: CacheHandle, user: str) -> bool:
    """Counts the request and checks the limit; the broker increments atomically."""
    return rates.incr(user, ttl_ms=WINDOW_MS) <= LIMIT


def main() -> None:
    with Client() as client:  # reads PENSTOCK_URL, PENSTOCK_TOKEN and PENSTOCK_TOKEN_FILE
        client.create_cache("default", "default", CACHE)
        rates = client.cache(CACHE)
        for number in (1, 2, 3, 4):
            print(f"request {number} of ada: {answer(is_allowed(rates, 'ada'))}")
        print(f"request 1 of bob: {answer(is_allowed(rates, 'bob'))}")
        time.sleep(WINDOW_MS / 1000)
        print(f"two seconds later: {answer(is_allowed(rates, 'ada'))}")


def answer(allowed: bool) -> str:
    return "allowed" if allowed else "refused"


if __name__ == "__main__":
    main()
