"""Plans for declared resources: what to create and what to change, and the steps to get there.

A plan compares the declaration with the broker. Only settings that are declared are compared, and
nothing is ever deleted, so declaring the same again changes nothing. Must not know where the
declaration comes from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from penstock.api.engine import Engine
from penstock.api.outcomes import Done
from penstock.api.topics import RetryDefaults, TopicReport
from penstock.model.audit import Actor
from penstock.model.errors import FailedPrecondition, NotFound, PenstockError
from penstock.model.quotas import NO_QUOTA, Quota
from penstock.model.scopes import DEFAULT_SCOPE, Scope, full_name
from penstock.model.tenancy import CacheConfig, Entry, Kind, Path, StreamConfig
from penstock.model.units import format_duration
from penstock.server.declarations import (
    DeclaredCache,
    DeclaredEntry,
    DeclaredQuota,
    DeclaredResources,
    DeclaredStream,
    DeclaredTopic,
    check_unique,
    entries_of,
    only_quotas,
    topic_path,
)
from penstock.server.registry.entries import RETENTION, SIZE, lasting_difference
from penstock.server.routes.cache_settings import cache_config
from penstock.server.routes.quotas import quota_config
from penstock.server.routes.stream_settings import stream_config


class SettingChange(msgspec.Struct, rename={"before": "from", "after": "to"}):
    setting: str
    before: Any
    after: Any


class ResourceStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One resource of a plan. `conflict`: it exists with a setting that cannot change, or it cannot
    be created, for this `reason`."""

    action: Literal["create", "change", "keep", "conflict"]
    kind: Literal["tenant", "namespace", "quota", "stream", "cache", "topic"]
    name: str
    changes: list[SettingChange] = []
    reason: str = ""


EntryConfig = StreamConfig | CacheConfig | Quota

Command = Callable[[Done[Any]], None]
"""Calls the engine with the callback."""


class PlannedStep(msgspec.Struct):
    step: ResourceStep
    commands: list[Command] = []


Plan = list[PlannedStep]


def make_plan(engine: Engine, declared: DeclaredResources, done: Done[Plan]) -> None:
    """Gives the plan, or the error in the declaration."""
    try:
        wanted = _Wanted(engine, declared)
    except PenstockError as error:
        done(error)
        return

    def found(outcomes: list[Any]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, PenstockError) and not isinstance(outcome, NotFound):
                done(outcome)
                return
        try:
            plan = wanted.plan(outcomes)
        except PenstockError as error:
            done(error)
        else:
            done(plan)

    _all_of(wanted.look_ups, found)


def carry_out(plan: Plan, *, changes: bool, done: Done[list[ResourceStep]]) -> None:
    """Creates what is missing and, with `changes`, changes what differs. Gives the steps that were
    taken. If a part of that is impossible, nothing is done."""
    actions = {"create", "change"} if changes else {"create"}
    chosen = [planned for planned in plan if planned.step.action in actions]
    impossible = [p.step for p in plan if p.step.action == "conflict"]
    if changes and impossible:
        reasons = "; ".join(f"{s.kind} {s.name!r}: {s.reason}" for s in impossible[:10])
        done(FailedPrecondition(f"{reasons}. Nothing was changed"))
        return

    def finished(outcomes: list[Any]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, PenstockError):
                done(outcome)
                return
        done([planned.step for planned in chosen])

    _all_of([command for planned in chosen for command in planned.commands], finished)


async def declare(
    engine: Engine, declared: DeclaredResources, *, changes: bool, actor: Actor | None
) -> list[ResourceStep]:
    """Makes a plan and carries it out, in the actor's name. Returns all its steps."""
    loop = asyncio.get_running_loop()
    planned: asyncio.Future[Plan | PenstockError] = loop.create_future()
    make_plan(engine, declared, planned.set_result)
    plan = await planned
    if isinstance(plan, PenstockError):
        raise plan
    taken: asyncio.Future[list[ResourceStep] | PenstockError] = loop.create_future()
    with engine.audit.acting(actor):
        carry_out(plan, changes=changes, done=taken.set_result)
    outcome = await taken
    if isinstance(outcome, PenstockError):
        raise outcome
    return [planned_step.step for planned_step in plan]


def _all_of(commands: Sequence[Command], done: Callable[[list[Any]], None]) -> None:
    """Gives the outcomes in the order of the commands. All commands are decided at once, in this
    order; only their answers come later."""
    outcomes: list[Any] = [None] * len(commands)
    left = len(commands)
    if not left:
        done(outcomes)

    def settled(index: int, outcome: Any) -> None:
        nonlocal left
        outcomes[index] = outcome
        left -= 1
        if not left:
            done(outcomes)

    for index, command in enumerate(commands):
        command(partial(settled, index))


class _Wanted:
    """A declaration that was checked, and the look-ups that its plan needs.

    `outcomes` of a plan are those of `look_ups`: first one for each entry of the registry, then one
    for each topic, then one for each namespace that is named but not declared.
    """

    def __init__(self, engine: Engine, declared: DeclaredResources) -> None:
        check_unique(declared)
        self._engine = engine
        self._entries = entries_of(declared)
        self._only_quotas = only_quotas(declared)
        self._topics = {topic_path(topic): topic for topic in declared.topics}
        declared_scopes = {path[:2] for kind, path in self._entries if kind == "namespace"}
        named = [path[:2] for kind, path in self._entries if kind in ("stream", "cache")]
        named += [path[:2] for path in self._topics]
        self._scopes = [scope for scope in dict.fromkeys(named) if scope not in declared_scopes]
        registry = engine.registry
        self.look_ups: list[Command] = [
            *(partial(registry.get, kind, path) for kind, path in self._entries),
            *(partial(engine.describe_topic, _full(path)) for path in self._topics),
            *(partial(registry.get, "namespace", (*scope, "")) for scope in self._scopes),
        ]

    def plan(self, outcomes: list[Any]) -> Plan:
        found = iter(outcomes)
        entries = [(key, body, next(found)) for key, body in self._entries.items()]
        topics = [(path, body, next(found)) for path, body in self._topics.items()]
        missing = {
            scope: _undeclared_namespace(scope)
            for scope, outcome in zip(self._scopes, found, strict=True)
            if isinstance(outcome, NotFound)
        }
        return [
            *(step for each in entries for step in self._entry_steps(*each, missing)),
            *(self._topic_step(path, body, outcome, missing) for path, body, outcome in topics),
        ]

    def _entry_steps(
        self,
        key: tuple[Kind, Path],
        body: DeclaredEntry,
        found: Entry | NotFound,
        missing: dict[Scope, str],
    ) -> list[PlannedStep]:
        """Returns the step of an entry; of a tenant or namespace with a quota, that of the quota
        too. An entry that is new is created together with its quota."""
        kind, path = key
        name = "/".join(part for part in path if part)
        is_quota = isinstance(body, DeclaredQuota)
        if not isinstance(found, NotFound):
            steps = [] if body is None or is_quota else [self._difference(found, kind, name, body)]
            if not steps and key not in self._only_quotas:
                steps = [PlannedStep(ResourceStep(action="keep", kind=kind, name=name))]
            return [*steps, self._difference(found, "quota", name, body)] if is_quota else steps
        if path[:2] in missing:
            return [_conflict(kind, name, missing[path[:2]])]
        if key in self._only_quotas:
            return [_conflict("quota", name, _undeclared(path))]
        config = _config(body)
        wanted = Entry(kind=kind, tenant_id=path[0], namespace=path[1], name=path[2], **config)
        create = partial(self._engine.registry.create, wanted)
        steps = [PlannedStep(ResourceStep(action="create", kind=kind, name=name), [create])]
        if is_quota:
            limits = _changes(NO_QUOTA, wanted.quota or NO_QUOTA)
            quota = ResourceStep(action="create", kind="quota", name=name, changes=limits)
            steps.append(PlannedStep(quota))
        return steps

    def _difference(
        self, entry: Entry, kind: Kind | Literal["quota"], name: str, body: DeclaredEntry
    ) -> PlannedStep:
        config = _config(body, entry)
        (wanted,) = config.values()
        changes = _changes(entry.stream or entry.cache or entry.quota, wanted or NO_QUOTA)
        if not changes:
            return PlannedStep(ResourceStep(action="keep", kind=kind, name=name))
        lasting = "" if kind == "quota" else lasting_difference(entry, wanted)
        if lasting:
            return _conflict(kind, name, f"{lasting} cannot change; create another", changes)
        step = ResourceStep(action="change", kind=kind, name=name, changes=changes)
        change: Command = lambda done: self._engine.registry.change(  # noqa: E731
            entry.path, done, if_revision=entry.revision, **config
        )
        return PlannedStep(step, [change])

    def _topic_step(
        self,
        path: Path,
        body: DeclaredTopic,
        found: TopicReport | NotFound,
        missing: dict[Scope, str],
    ) -> PlannedStep:
        scope = path[:2]
        name = path[2] if scope == DEFAULT_SCOPE else "/".join(path)
        settings = _topic_settings(body)
        configure: Command = lambda done: self._engine.configure_topic(  # noqa: E731
            _full(path),
            settings.get("retention_ms"),
            settings.get("retention_bytes"),
            done,
            after_archive=body.after_archive,
            retries=_retries(body),
        )
        if isinstance(found, NotFound):
            if scope in missing:
                return _conflict("topic", name, missing[scope])
            create: Command = lambda done: self._engine.create_topic(  # noqa: E731
                _full(path),
                body.partitions or 1,
                done,
                after_archive=body.after_archive,
                retries=_retries(body),
            )
            step = ResourceStep(action="create", kind="topic", name=name)
            return PlannedStep(step, [create, configure] if settings else [create])
        changes = [
            SettingChange(setting, getattr(found, setting), value)
            for setting, value in settings.items()
            if getattr(found, setting) != value
        ]
        if body.partitions not in (None, len(found.partitions)):
            changes.insert(0, SettingChange("partitions", len(found.partitions), body.partitions))
            return _conflict("topic", name, "the number of partitions cannot change", changes)
        action: Literal["change", "keep"] = "change" if changes else "keep"
        step = ResourceStep(action=action, kind="topic", name=name, changes=changes)
        return PlannedStep(step, [configure] if changes else [])


def _conflict(
    kind: Any, name: str, reason: str, changes: list[SettingChange] | None = None
) -> PlannedStep:
    step = ResourceStep(
        action="conflict", kind=kind, name=name, changes=changes or [], reason=reason
    )
    return PlannedStep(step)


def _full(path: Path) -> str:
    return full_name(path[:2], path[2])


def _config(body: DeclaredEntry, entry: Entry | None = None) -> dict[str, Any]:
    """Returns the config of an entry by the name of its member; settings that are not declared stay
    as they are."""
    if isinstance(body, DeclaredStream):
        return {"stream": stream_config(body, entry.stream if entry else None)}
    if isinstance(body, DeclaredQuota):
        return {"quota": quota_config(body, entry.quota if entry else None)}
    if isinstance(body, DeclaredCache):
        return {"cache": cache_config(body, entry.cache if entry else None)}
    return {}


def _changes(now: EntryConfig | None, wanted: EntryConfig) -> list[SettingChange]:
    """Returns the settings that differ, as a declaration names and writes them."""
    now = now or type(wanted)()
    return [
        SettingChange(_DECLARED_AS.get(name, name), _declared(now, name), _declared(wanted, name))
        for name in wanted.__struct_fields__
        if getattr(now, name) != getattr(wanted, name)
    ]


_DECLARED_AS = {"retention_ms": "retention"}
"""Settings of streams that have another name in a declaration."""


def _declared(config: EntryConfig, name: str) -> Any:
    value = getattr(config, name)
    if isinstance(config, Quota) and not value:
        return None
    is_duration = name in ("retention_ms", "stream_retention")
    return format_duration(value) if is_duration and value else value


def _undeclared_namespace(scope: Scope) -> str:
    tenant, namespace = scope
    return (
        f"there is no namespace {namespace!r} of tenant {tenant!r}: declare it with "
        f'namespaces = ["{namespace}"] in the [[tenants]] of {tenant!r}'
    )


def _undeclared(path: Path) -> str:
    """Says that the tenant or namespace of a quota is missing."""
    if path[1]:
        return _undeclared_namespace(path[:2])
    return f"there is no tenant {path[0]!r}: declare it in [[tenants]]"


def _topic_settings(body: DeclaredTopic) -> dict[str, Any]:
    settings = {
        name: getattr(body, name)
        for name in ("after_archive", *RetryDefaults.__struct_fields__)
        if getattr(body, name) is not None
    }
    if body.retention_ms is not None:
        settings["retention_ms"] = RETENTION("retention_ms", body.retention_ms)
    if body.retention_bytes is not None:
        zero = body.retention_bytes in (0, "0")
        settings["retention_bytes"] = 0 if zero else SIZE("retention_bytes", body.retention_bytes)
    return settings


def _retries(body: DeclaredTopic) -> RetryDefaults:
    return RetryDefaults(**{name: getattr(body, name) for name in RetryDefaults.__struct_fields__})
