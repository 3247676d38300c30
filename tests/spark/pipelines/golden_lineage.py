"""The lineage of a journal in plain Python: one event after another, as a person would tell it.

Shares no code with the pipeline. It keeps everything in memory and knows no deleted topics or
groups, of which the golden sample has none.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Row = dict[str, Any]
IDS = ("run_id", "step_id", "parent_step_id", "tenant_id", "routing_label")
LENGTHS = ("waiting_ms", "running_ms", "retry_ms")
SCOPE: Row = {"tenant": None, "namespace": None}
"""All topics of the golden sample are in the default namespace."""


def ms(start: datetime | None, end: datetime | None) -> int | None:
    """Whole milliseconds, as the broker's clock counts; never below 0."""
    if start is None or end is None:
        return None
    return max(0, round((end - start).total_seconds() * 1000))


@dataclass
class Message:
    """One message as one group sees it."""

    place: tuple[str, int, int]
    group: str | None
    ids: Row
    produced_at: datetime
    tries: list[Row] = field(default_factory=list)
    ended: str | None = None
    ended_at: datetime | None = None
    last_at: datetime | None = None
    last_position: int = 0

    @property
    def outcome(self) -> str:
        if self.ended == "dead_lettered":
            return "dead_lettered"
        if self.ended is not None:
            return "succeeded"
        return "running" if self.tries and self.tries[-1]["outcome"] == "running" else "waiting"

    @property
    def lengths(self) -> Row:
        if not self.tries:
            waited = ms(self.produced_at, self.ended_at)
            return {"waiting_ms": waited or 0, "running_ms": 0, "retry_ms": 0}
        first, last = self.tries[0], self.tries[-1]
        running, lost_until = 0, self.ended_at or last["ended_at"] or last["delivered_at"]
        if self.ended == "acked":
            running, lost_until = last["running_ms"], last["delivered_at"]
        return {
            "waiting_ms": first["waiting_ms"],
            "running_ms": running,
            "retry_ms": ms(first["delivered_at"], lost_until),
        }


def messages(rows: list[Row]) -> list[Message]:
    produced: dict[tuple[str, int, int], Row] = {}
    found: dict[tuple[Any, ...], Message] = {}
    for row in sorted(rows, key=lambda row: row["position"]):
        place = (row["topic"], row["partition"], row["offset"])
        if row["kind"] == "produced":
            produced[place] = row
            continue
        key = (*place, row["group"])
        if key not in found:
            born = produced[place]
            ids = {name: born[name] for name in IDS}
            found[key] = Message(place, row["group"], ids, born["timestamp"])
        _happened(found[key], row)
    taken = {message.place for message in found.values()}
    for place, row in produced.items():
        if place not in taken:
            ids = {name: row[name] for name in IDS}
            born = row["timestamp"]
            last = {"last_at": born, "last_position": row["position"]}
            found[place] = Message(place, None, ids, born, **last)
    return list(found.values())


def _happened(message: Message, row: Row) -> None:
    kind, at = row["kind"], row["timestamp"]
    message.last_at, message.last_position = at, row["position"]
    if kind == "delivered":
        available_at = message.produced_at
        if message.tries:
            available_at = message.tries[-1]["retry_at"] or message.tries[-1]["ended_at"]
        message.tries.append(
            {
                "attempt": row["attempt"],
                "owner": row["owner"],
                "outcome": "running",
                "reason": None,
                "available_at": available_at,
                "delivered_at": at,
                "ended_at": None,
                "retry_at": None,
                "waiting_ms": ms(available_at, at),
                "running_ms": None,
                "position": row["position"],
            }
        )
    elif kind == "returned":
        message.tries.pop()
    elif kind in ("acked", "nacked", "timed_out"):
        current = message.tries[-1]
        current |= {"outcome": kind, "reason": row["reason"], "retry_at": row["retry_at"]}
        current |= {"ended_at": at, "running_ms": ms(current["delivered_at"], at)}
        current["end_position"] = row["position"]
    if kind in ("acked", "dead_lettered", "skipped"):
        message.ended, message.ended_at = kind, at


def attempts(rows: list[Row]) -> list[Row]:
    return [
        dict(zip(("topic", "partition", "offset"), message.place, strict=True))
        | SCOPE
        | {"group": message.group, "produced_at": message.produced_at, "has_skew": False}
        | message.ids
        | {name: value for name, value in one.items() if name != "end_position"}
        for message in messages(rows)
        for one in message.tries
    ]


def steps(rows: list[Row]) -> list[Row]:
    members: dict[tuple[Any, ...], list[Message]] = defaultdict(list)
    for message in messages(rows):
        topic = message.place[0]
        is_unread_letter = topic.startswith("dlq.") and message.group is None
        if message.ids["run_id"] is not None and not is_unread_letter:
            key = (message.ids["run_id"], message.ids["step_id"], topic, message.group)
            members[key].append(message)
    found = [_step(key, group) for key, group in members.items()]
    runs: dict[str, list[Row]] = defaultdict(list)
    for step in found:
        runs[step["run_id"]].append(step)
    for run in runs.values():
        _trace([step for step in run if not step["topic"].startswith("dlq.")])
    return found


def _step(key: tuple[Any, ...], group: list[Message]) -> Row:
    outcomes = {message.outcome for message in group}
    order = ("running", "waiting", "dead_lettered", "succeeded")
    tries = [one for message in group for one in message.tries]
    failed = [one for one in tries if one["outcome"] in ("nacked", "timed_out")]
    failed.sort(key=lambda one: one["end_position"])
    finished = [message.ended_at for message in group if message.ended_at is not None]
    last = max(group, key=lambda m: (m.ended_at or m.last_at, m.last_position))
    return {
        **dict(zip(("run_id", "step_id", "topic", "group"), key, strict=True)),
        **SCOPE,
        "parents": sorted({m.ids["parent_step_id"] for m in group} - {None}),
        "tenant_id": min((m.ids["tenant_id"] for m in group if m.ids["tenant_id"]), default=None),
        "outcome": next(word for word in order if word in outcomes),
        "reason": failed[-1]["reason"] if failed else None,
        "messages": len(group),
        "attempts": len(tries),
        "failures": len(failed),
        "retries": sum(max(0, len(message.tries) - 1) for message in group),
        "dead_letters": sum(message.outcome == "dead_lettered" for message in group),
        "produced_at": min(message.produced_at for message in group),
        "delivered_at": min((one["delivered_at"] for one in tries), default=None),
        "finished_at": max(finished) if len(finished) == len(group) else None,
        **{name: sum(message.lengths[name] for message in group) for name in LENGTHS},
        "last_message": {
            "produced_at": last.produced_at,
            "ended_at": last.ended_at or last.last_at,
            **last.lengths,
        },
        "has_skew": False,
        "path_position": None,
        "children": 0,
        "missing_parents": 0,
        "in_cycle": False,
    }


def _trace(run: list[Row]) -> None:
    names = {step["step_id"] for step in run} - {None}
    parents: dict[str, set[str]] = defaultdict(set)
    for step in run:
        parents[step["step_id"]] |= set(step["parents"])
    for step in run:
        name = step["step_id"]
        children = {other["step_id"] for other in run if name in other["parents"]}
        step["children"] = len(children) if name is not None else 0
        step["missing_parents"] = len(set(step["parents"]) - names)
        step["in_cycle"] = name is not None and name in _ancestors(name, parents)
    for position, step in enumerate(_path(run)):
        step["path_position"] = position


def _ancestors(name: str, parents: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    while more := {up for known in (found | {name}) for up in parents[known]} - found:
        found |= more
    return found


def _path(run: list[Row]) -> list[Row]:
    path = [_last(run)]
    while True:
        child = path[0]
        seen = {step["step_id"] for step in path}
        above = [s for s in run if s["step_id"] in child["parents"] and s["step_id"] not in seen]
        early = [
            s for s in above if s["delivered_at"] and s["delivered_at"] <= child["produced_at"]
        ]
        if not above:
            return path
        path.insert(0, _last(early or above))


def _last(steps: list[Row]) -> Row:
    named = sorted(steps, key=lambda s: (s["step_id"] or "", s["topic"], s["group"] or ""))
    return max(named, key=lambda step: step["last_message"]["ended_at"])


def runs(rows: list[Row]) -> list[Row]:
    by_run: dict[str, list[Row]] = defaultdict(list)
    for step in steps(rows):
        if not step["topic"].startswith("dlq."):
            by_run[step["run_id"]].append(step)
    return [_run(run_id, members) for run_id, members in by_run.items()]


def _run(run_id: str, members: list[Row]) -> Row:
    outcomes = {step["outcome"] for step in members}
    is_open = bool(outcomes & {"running", "waiting"})
    started = min(step["produced_at"] for step in members)
    finished = None if is_open else max(step["finished_at"] for step in members)
    path = [step["last_message"] for step in members if step["path_position"] is not None]
    sums = ("messages", "attempts", "failures", "retries", "dead_letters", *LENGTHS)
    outcome = "failed" if "dead_lettered" in outcomes else "succeeded"
    return {
        "run_id": run_id,
        **SCOPE,
        "tenant_id": min((s["tenant_id"] for s in members if s["tenant_id"]), default=None),
        "outcome": "running" if is_open else outcome,
        "started_at": started,
        "finished_at": finished,
        "duration_ms": ms(started, finished),
        "steps": len(members),
        **{name: sum(step[name] for step in members) for name in sums},
        "path_steps": len(path),
        "path_ms": ms(
            min(last["produced_at"] for last in path), max(last["ended_at"] for last in path)
        ),
        "missing_parents": sum(step["missing_parents"] for step in members),
        "has_cycle": any(step["in_cycle"] for step in members),
        "has_skew": False,
        "is_traced": True,
        "topics": sorted({step["topic"] for step in members}),
    }


def critical_paths(rows: list[Row]) -> list[Row]:
    return [
        {name: step[name] for name in ("run_id", "path_position", "step_id", "topic", "group")}
        | SCOPE
        | {"outcome": step["outcome"], "started_at": step["last_message"]["produced_at"]}
        | {name: step["last_message"][name] for name in ("ended_at", *LENGTHS)}
        for step in steps(rows)
        if step["path_position"] is not None
    ]
