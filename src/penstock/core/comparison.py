"""Compares images of a live state and of a replayed one, for tests.

That time passes is no record: a live state may have made a waiting entry ready, or forgotten an
expired key, where a replayed one has not yet. Must not know how images are taken or restored.
"""

from __future__ import annotations

import msgspec

from penstock.core.groups import READY, WAITING
from penstock.core.image import CacheImage, ProgressImage, StateImage, TopicImage


def comparable(image: StateImage, now_ms: int) -> StateImage:
    """The image as of `now_ms`."""
    return StateImage(
        image.next_id,
        image.last_ts,
        [_comparable_topic(topic, now_ms) for topic in image.topics],
        [key for key, until in _produced(image) if until > now_ms],
        [until for _, until in _produced(image) if until > now_ms],
        image.registry,
        [_comparable_cache(cache, now_ms) for cache in image.caches],
        image.cache_floor,
        image.writers,
        image.journal_archived,
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
    groups = [
        msgspec.structs.replace(
            group, progress=[_comparable_progress(progress, now_ms) for progress in group.progress]
        )
        for group in image.groups
    ]
    return msgspec.structs.replace(image, groups=groups, effects=effects)


def _comparable_progress(image: ProgressImage, now_ms: int) -> ProgressImage:
    unfinished = [
        msgspec.structs.replace(entry, state=READY, until=0)
        if entry.state == WAITING and entry.until <= now_ms
        else entry
        for entry in image.unfinished
    ]
    ready = [entry.offset for entry in unfinished if entry.state == READY]
    return msgspec.structs.replace(image, unfinished=unfinished, ready=ready)
