"""Makes images of a live state and of a replayed one comparable, for tests.

Expired keys, transactions, effects and cache entries are left out: a state drops them when it
comes across them, the live one earlier than the replayed one. All else must be equal, since only
records change a state. Must not know how images are taken or restored.
"""

from __future__ import annotations

import msgspec

from penstock.core.image import CacheImage, StateImage, TopicImage


def comparable(image: StateImage, now_ms: int) -> StateImage:
    """Returns the image without what has expired at `now_ms`."""
    kept = [(key, until) for key, until in _produced(image) if until > now_ms]
    return msgspec.structs.replace(
        image,
        topics=[_comparable_topic(topic, now_ms) for topic in image.topics],
        produced_keys=[key for key, _ in kept],
        produced_until=[until for _, until in kept],
        caches=[_comparable_cache(cache, now_ms) for cache in image.caches],
        transactions=[each for each in image.transactions if each.expires > now_ms],
    )


def _produced(image: StateImage) -> list[tuple[str, int]]:
    return list(zip(image.produced_keys, image.produced_until, strict=True))


def _comparable_cache(image: CacheImage, now_ms: int) -> CacheImage:
    entries = [entry for entry in image.entries if not 0 < entry.expires <= now_ms]
    return msgspec.structs.replace(image, entries=entries)


def _comparable_topic(image: TopicImage, now_ms: int) -> TopicImage:
    open_keys = {
        (group.name, entry.effect_key)
        for group in image.groups
        for progress in group.progress
        for entry in progress.unfinished
    }
    effects = [
        effect
        for effect in image.effects
        if effect.expires > now_ms or (effect.group, effect.effect_key) in open_keys
    ]
    return msgspec.structs.replace(image, effects=effects)
