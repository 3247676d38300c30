"""Clients that change topics and groups while others use them: retention, progress, effects, and
topics and groups that come and go."""

from __future__ import annotations

import asyncio
import random

from tests.soak.queue_load import Setting
from tests.soak.queue_model import STORED, Sent, Topic, effect_of
from tests.soak.wire import Wire

CHURN_PREFIX = "churn"


class Publisher:
    """Publishes progress of a group that nobody consumes with; it only goes forward."""

    def __init__(self, setting: Setting, topic: Topic, group: str) -> None:
        self._setting = setting
        self._topic = topic
        self._name = group
        self._group = topic.groups[group]
        self._rng = setting.new_rng()

    async def run(self) -> None:
        model, topic = self._setting.model, self._topic
        path = f"/v1/topics/{topic.name}/groups/{self._name}/progress"
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                found = await wire.ask("GET", f"/v1/topics/{topic.name}/offsets")
                if found.status != 200:
                    model.claim(found.status == 503, f"offsets of {topic.name}: {found}")
                    return
                ends = {one["partition"]: one["next"] for one in found.json["partitions"]}
                wanted = {p: max(0, end - self._rng.randint(0, 10)) for p, end in ends.items()}
                for offset, value in topic.values.items():
                    if offset < wanted[topic.sent[value].partition]:
                        self._group.story(offset).may_be_done = True
                reached = [{"partition": p, "next": n} for p, n in wanted.items()]
                answer = await wire.ask("POST", path, {"partitions": reached})
                if answer.status == 200:
                    model.counts["progress published"] += 1
                    for one in answer.json["partitions"]:
                        partition, told = one["partition"], one["next"]
                        least = max(wanted[partition], self._group.progress.get(partition, 0))
                        model.claim(told >= least, f"{path}: {one} after {least}")
                        self._group.progress[partition] = told
                else:
                    model.claim(answer.status == 503, f"{path}: {answer}")
                await asyncio.sleep(self._rng.uniform(0.05, 0.4))


class Effects:
    """Begins, commits and fails effects of messages that were stored with a key."""

    def __init__(self, setting: Setting, topic: Topic, group: str) -> None:
        self._setting = setting
        self._topic = topic
        self._name = group
        self._group = topic.groups[group]
        self._rng = setting.new_rng()

    async def run(self) -> None:
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                keyed = [m for m in self._topic.sent.values() if m.is_idempotent]
                chosen = [m for m in keyed if m.state == STORED and m.offset is not None]
                if chosen:
                    await self._begin(wire, self._rng.choice(chosen))
                await asyncio.sleep(self._rng.uniform(0.02, 0.2))

    async def _begin(self, wire: Wire, message: Sent) -> None:
        model, group, key = self._setting.model, self._group, effect_of(message)
        body = {
            "tenant_id": key[0],
            "topic": self._topic.name,
            "group": self._name,
            "key": key[1],
            "owner": "effects",
        }
        answer = await wire.ask("POST", "/v1/idempotency/begin", body | {"lease_ms": 100})
        if answer.status != 200:
            model.claim(answer.status in (409, 429, 503), f"begin of {key}: {answer}")
            return
        if key in group.effects:
            told = {"status": "COMMITTED", "result": group.effects[key][0]}
            model.claim(answer.json == told, f"the effect {key} is {told}; begin says {answer}")
            model.counts["effects found committed"] += 1
        elif answer.json["status"] == "COMMITTED":
            model.claim(key in group.maybe_effects, f"nobody committed {key}: {answer}")
        elif self._rng.random() < 0.3:
            answer = await wire.ask("POST", "/v1/idempotency/fail", body | {"reason": "soak"})
            model.claim(answer.status in (204, 409, 503), f"fail of {key}: {answer}")
        else:
            await self._commit(wire, message, body)

    async def _commit(self, wire: Wire, message: Sent, body: dict[str, str]) -> None:
        model, group, key = self._setting.model, self._group, effect_of(message)
        result = f"result of {key[1]}"
        group.maybe_effects.add(key)
        if message.offset is not None:
            group.story(message.offset).may_be_done = True
        answer = await wire.ask("POST", "/v1/idempotency/commit", body | {"result": result})
        if answer.status == 204:
            model.counts["effects committed"] += 1
            group.effects[key] = (result, model.round)
        else:
            model.claim(answer.status in (409, 429, 503), f"commit of {key}: {answer}")


class Churn:
    """Topics and groups that come and go under few names; each life has messages of its own."""

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        self._setting = setting
        self._rng = rng

    async def run(self) -> None:
        model, rng = self._setting.model, self._rng
        async with Wire(self._setting.port) as wire:
            while self._setting.goes_on():
                name = f"{CHURN_PREFIX}-{rng.randrange(3)}"
                partitions = rng.randint(1, 3)
                body = {"name": name, "partitions": partitions}
                made = await wire.ask("POST", "/v1/topics", body)
                allowed = (200, 201, 409, 503)
                model.claim(made.status in allowed, f"{name} is not created: {made}")
                stamp = f"{name}-{next(self._setting.numbers)}"
                values = [
                    f"{stamp}-{n}:" + "x" * rng.randrange(800) for n in range(rng.randint(1, 15))
                ]
                bodies = [{"topic": name, "key": str(n), "value": v} for n, v in enumerate(values)]
                await wire.ask("POST", "/v1/produce/batch", bodies)
                if rng.random() < 0.5:
                    done = {"partitions": [{"partition": 0, "next": 0}]}
                    path = f"/v1/topics/{name}/groups/brief"
                    await wire.ask("POST", f"{path}/progress", done)
                    gone = await wire.ask("DELETE", path)
                    model.claim(gone.status in (204, 404, 503), f"{path} stays: {gone}")
                    model.counts["groups deleted"] += gone.status == 204
                await asyncio.sleep(rng.uniform(0, 0.2))
                if rng.random() < 0.7:
                    gone = await wire.ask("DELETE", f"/v1/topics/{name}")
                    model.claim(gone.status in (204, 404, 503), f"{name} stays: {gone}")
                    model.counts["topics deleted"] += gone.status == 204
