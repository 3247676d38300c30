"""`penstock wal`: inspects, verifies and repairs the data directory of a stopped broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import msgspec

from penstock.cli.connection import json_flag
from penstock.cli.terminal import CommandFailed, printable, show, show_json, show_table, size
from penstock.storage import offline
from penstock.storage import repair as repairing
from penstock.storage.directory_check import SealedFile
from penstock.storage.index_repair import Repair
from penstock.storage.vfs import Vfs

RECORD_CHARS = 200
"""The length at which the text of a record is cut off."""

_directory = click.argument("directory", metavar="DIR")


@click.group()
def wal() -> None:
    """Inspect, verify and repair the files of a stopped broker."""


@wal.command()
@_directory
@click.option("--records", is_flag=True, help="Also show every record.")
@json_flag
def inspect(directory: str, records: bool, as_json: bool) -> None:
    """List the segments of the log in DIR and their contents."""
    with _readable():
        seen = offline.inspect(Vfs(), directory, records=records)
        if as_json:
            for each in seen:
                show_json(_record(each) if isinstance(each, offline.RecordSeen) else each)
            return
        if not records:
            summaries = [each for each in seen if isinstance(each, offline.SegmentSummary)]
            _show_segments(summaries)
            return
        for each in seen:
            if isinstance(each, offline.SegmentSummary):
                show(f"{each.path}: {each.state}, {each.records} records in {each.frames} frames")
            else:
                _show_record(each)


@wal.command()
@_directory
@json_flag
def verify(directory: str, as_json: bool) -> None:
    """Check everything in DIR and tell whether a broker would start. Changes nothing.

    The exit code is 1 if something is damaged or missing.
    """
    with _readable():
        report = offline.verify(Vfs(), directory)
    if as_json:
        show_json(report)
    else:
        _show_report(report)
    if report.damage is not None:
        damage = report.damage
        raise CommandFailed(
            f"{damage.path} is damaged at byte {damage.position}: {damage.detail}. "
            "A start is refused; `penstock wal repair --dry-run` says what can be done"
        )
    if report.hidden:
        raise CommandFailed(
            "messages are on disk that no reader finds. A start succeeds; `penstock wal repair` "
            "puts them within reach and loses nothing"
        )
    damaged = [file.path for file in report.files if file.state != "sound"]
    if damaged:
        raise CommandFailed(
            f"{', '.join(damaged)}: damaged. A start succeeds; groups that need the messages in "
            "it, readers of the journal in it, and the batch of a staged piece wait until the file "
            "is restored from a copy"
        )
    if not as_json:
        show("all is sound: a start succeeds")


def _show_report(report: offline.VerifyReport) -> None:
    _show_segments(report.segments)
    show(f"\n{report.records:,} records in {report.frames:,} frames")
    if report.files:
        show("")
        show_table(
            ("file", "state", "what is wrong"),
            [(file.path, file.state, _what_is_wrong(file)) for file in report.files],
        )
    for file in report.files:
        for each in file.lost:
            show(f"cannot be {'read' if file.kind == 'journal' else 'delivered'}: {each}")
    for detail in report.index:
        show(f"index of batches: {detail}")
    for hidden in report.hidden:
        show(f"cannot be reached: {hidden}, in {hidden.path}")
    for tail in report.torn:
        show(
            f"torn tail: {tail.path} at byte {tail.position}, {tail.bytes} bytes of a write "
            "that a crash interrupted; the next start cuts it off, and nothing is lost"
        )
    for path in report.leftovers:
        show(f"leftover: {path}; the next start removes it")


def _what_is_wrong(file: SealedFile) -> str:
    if file.state != "damaged":
        return file.detail
    return f"byte {file.position}: {file.detail}"


@wal.command()
@_directory
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option(
    "--set-damage-aside",
    is_flag=True,
    help="Continue without the damaged files; they are kept under other names.",
)
@json_flag
def repair(directory: str, dry_run: bool, set_damage_aside: bool, as_json: bool) -> None:
    """Repair the data directory DIR: cut a torn tail off the log, and explain or set aside damage.

    Also rewrites batches of history that make messages unreachable. Nothing is lost by that.

    The exit code is 1 if the broker still refuses to start.
    """
    with _readable():
        outcome = repairing.repair(
            Vfs(), directory, dry_run=dry_run, set_damage_aside=set_damage_aside
        )
    if as_json:
        show_json(outcome)
    else:
        _show_repair(outcome, dry_run=dry_run, insists=set_damage_aside)
    if outcome.damage is not None and not outcome.done:
        raise click.exceptions.Exit(1)


def _show_repair(outcome: Repair, *, dry_run: bool, insists: bool) -> None:
    show(outcome.explanation)
    for path, aside in outcome.set_aside.items():
        show(f"{'kept' if outcome.done else 'would keep'} {path} as {aside}")
    for each in outcome.lost:
        show(f"{'lost' if outcome.done else 'would lose'}: {each}")
    for each in outcome.found:
        show(f"{'can be reached again' if outcome.done else 'would be reached again'}: {each}")
    if outcome.done and outcome.found:
        show("done: every message on disk can be reached, and a start succeeds")
    elif outcome.done and outcome.damage is not None:
        show("done: the damage is set aside, and a start succeeds")
    elif outcome.done and outcome.cut:
        show("done: the torn tail is cut off")
    elif not outcome.possible:
        show("nothing was changed: there is no repair for this")
    elif dry_run and (outcome.cut or outcome.damage is not None or outcome.found):
        show("nothing was changed: this was a dry run")
    elif outcome.damage is not None and not insists:
        show("nothing was changed: --set-damage-aside was not given")


@contextmanager
def _readable() -> Iterator[None]:
    """Ends the command if the directory does not exist or cannot be read: that is no damage."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise CommandFailed(str(error)) from error


def _show_segments(segments: list[offline.SegmentSummary]) -> None:
    show_table(
        ("segment", "state", " first frame", " frames", " records", " used", " size"),
        [
            (
                each.path,
                each.state,
                each.first_seq,
                each.frames,
                each.records,
                f"{each.used:,}",
                size(each.bytes),
            )
            for each in segments
        ],
    )


def _show_record(seen: offline.RecordSeen) -> None:
    if seen.record is None:
        show(f"  {seen.position:>12}  unknown: {printable(seen.error)}")
        return
    fields = msgspec.json.encode(_fields(seen.record)).decode()
    if len(fields) > RECORD_CHARS:
        fields = f"{fields[:RECORD_CHARS]}… ({seen.bytes} bytes)"
    show(f"  {seen.position:>12}  {type(seen.record).__name__:<16} {printable(fields)}")


def _record(seen: offline.RecordSeen) -> dict[str, Any]:
    shown: dict[str, Any] = {"position": seen.position, "bytes": seen.bytes}
    if seen.record is None:
        return shown | {"error": seen.error}
    return shown | {"record": type(seen.record).__name__, "fields": _fields(seen.record)}


def _fields(record: msgspec.Struct) -> dict[str, Any]:
    """Returns the fields by name. On disk a record is an array without names."""
    return {name: getattr(record, name) for name in record.__struct_fields__}
