"""Traces of runs: the critical path, children, missing parents, cycles; without Spark."""

from __future__ import annotations

import random
import time

import pyarrow as pa
import pytest

from penstock.spark.pipelines.tracing import PathStep, trace, trace_runs


def step(
    name: str | None,
    *parents: str,
    started: int = 0,
    ended: int = 1,
    topic: str = "work",
    group: str | None = "workers",
) -> PathStep:
    return PathStep(name, topic, group, parents, started, started, ended)


def path(*steps: PathStep) -> list[str | None]:
    """The names of the critical path, from its beginning."""
    placed = [
        (place, one.step_id)
        for place, one in zip(trace(steps).place, steps, strict=True)
        if place is not None
    ]
    assert [place for place, _ in sorted(placed)] == list(range(len(placed)))
    return [name for _, name in sorted(placed)]


def test_the_path_leads_from_a_root_to_the_step_that_ended_last():
    plan = step("plan", ended=10)
    short = step("short", "plan", started=10, ended=20)
    long = step("long", "plan", started=10, ended=90)
    report = step("report", "short", "long", started=90, ended=100)
    assert path(report, long, plan, short) == ["plan", "long", "report"]


def test_a_branch_that_ends_last_is_the_path_also_if_nobody_waited_for_it():
    plan = step("plan", ended=10)
    report = step("report", "plan", started=10, ended=100)
    mail = step("mail", "plan", started=10, ended=500)
    assert path(plan, report, mail) == ["plan", "mail"]


def test_a_group_that_began_after_the_child_was_there_did_not_lead_to_it():
    plan = step("plan", started=0, ended=10)
    audit = step("plan", started=300, ended=400, group="audit")
    report = step("report", "plan", started=10, ended=500)
    placed = trace([plan, audit, report]).place
    assert placed == [0, None, 1]


def test_a_missing_parent_ends_the_path_and_is_counted():
    found = trace([step("merge", "gone", "fetch"), step("fetch", "gone", ended=0)])
    assert found.missing == [1, 1]
    assert found.place == [1, 0]


@pytest.mark.parametrize(
    ("steps", "in_cycle"),
    [
        ([step("a", "a")], [True]),
        ([step("a", "b"), step("b", "a")], [True, True]),
        (
            [step("root"), step("a", "root", "b"), step("b", "a"), step("leaf", "b")],
            [False, True, True, False],
        ),
    ],
)
def test_a_cycle_of_parents_is_found_and_ends_the_path(steps: list[PathStep], in_cycle: list[bool]):
    found = trace(steps)
    assert found.in_cycle == in_cycle
    assert len([place for place in found.place if place is not None]) <= len(steps)


def test_children_are_counted_once_whatever_groups_see_them():
    found = trace(
        [
            step("plan"),
            step("fetch", "plan"),
            step("fetch", "plan", group="audit"),
            step("rank", "plan"),
            step(None, "plan"),
        ]
    )
    assert found.children == [3, 0, 0, 0, 0]


def test_steps_without_an_id_may_end_a_path():
    assert path(step("plan", ended=5), step(None, "plan", started=5, ended=9)) == ["plan", None]


def test_of_steps_that_ended_at_once_the_path_is_always_the_same():
    steps = [step(name, ended=7) for name in "dbca"]
    for seed in range(5):
        random.Random(seed).shuffle(steps)
        assert path(*steps) == ["a"]


def test_a_run_of_many_steps_takes_time_in_proportion():
    count = 20_000
    chain = [step(f"{n}", f"{n - 1}", started=n, ended=n + 1) for n in range(count)]
    began = time.process_time()
    found = trace(chain)
    assert time.process_time() - began < 5
    assert found.place == list(range(count))


def test_no_steps_have_no_path():
    assert trace([]).place == []


# -- rows as Spark brings them -----------------------------------------------------------------


def batches(
    runs: dict[str, int], rows_each: int, topic: str = "work", **scope: str
) -> list[pa.RecordBatch]:
    """Runs of so many steps, each the parent of the next."""
    rows = [
        {
            "run_id": run,
            **scope,
            "step_id": f"{n}",
            "topic": topic,
            "group": "g",
            "parents": [f"{n - 1}"] if n else [],
            "produced_at": n * 1000,
            "delivered_at": n * 1000,
            "last_message": {"ended_at": n * 1000 + 1000},
        }
        for run, count in runs.items()
        for n in range(count)
    ]
    moment = pa.timestamp("us", "UTC")
    kinds = [("run_id", pa.string()), ("step_id", pa.string()), ("topic", pa.string())]
    kinds += [("tenant", pa.string()), ("namespace", pa.string())]
    kinds += [("group", pa.string()), ("parents", pa.list_(pa.string()))]
    kinds += [("produced_at", moment), ("delivered_at", moment)]
    kinds += [("last_message", pa.struct([("ended_at", moment)]))]
    table = pa.Table.from_pylist(rows, schema=pa.schema(kinds))
    return list(table.to_batches(max_chunksize=rows_each))


def places(found: list[pa.RecordBatch]) -> dict[str, list[int | None]]:
    seen: dict[str, list[int | None]] = {}
    for row in pa.Table.from_batches(found).to_pylist():
        seen.setdefault(row["run_id"], []).append(row["path_position"])
    return seen


@pytest.mark.parametrize("rows_each", [1, 2, 100])
def test_runs_of_two_tenants_with_one_id_are_traced_apart(rows_each: int):
    found = []
    plain = batches({"a": 2}, rows_each)
    acme = batches({"a": 3}, rows_each, tenant="acme", namespace="prod")
    for batch in trace_runs(iter([*plain, *acme])):
        found += [(row["tenant"], row["path_position"]) for row in batch.to_pylist()]
    assert found == [(None, 0), (None, 1), ("acme", 0), ("acme", 1), ("acme", 2)]


@pytest.mark.parametrize("rows_each", [1, 2, 3, 5, 100])
def test_a_run_is_traced_whole_however_batches_cut_it(rows_each: int):
    runs = {"a": 1, "b": 4, "c": 2, "d": 5}
    found = places(list(trace_runs(iter(batches(runs, rows_each)))))
    assert found == {run: list(range(count)) for run, count in runs.items()}


@pytest.mark.parametrize("rows_each", [1, 3, 100])
def test_a_run_of_too_many_steps_is_not_traced_and_the_others_are(rows_each: int):
    runs = {"a": 3, "long": 9, "z": 2}
    steps = batches(runs, rows_each)
    found = places(list(trace_runs(iter(steps), max_steps=4)))
    assert found == {"a": [0, 1, 2], "long": [None] * 9, "z": [0, 1]}


def test_steps_of_dead_letters_are_no_part_of_a_path():
    steps = [*batches({"a": 2}, 10), *batches({"a": 1}, 10, topic="dlq.work")]
    merged = pa.Table.from_batches(steps).combine_chunks().to_batches()
    rows = pa.Table.from_batches(list(trace_runs(iter(merged)))).to_pylist()
    assert [row["path_position"] for row in rows] == [0, 1, None]
    assert [row["children"] for row in rows] == [1, 0, 0]
