"""Repairs the data directory of a stopped broker so that it starts again.

Invariant: nothing is changed unless asked for. A torn tail is cut as a start would cut it, batches
that hide messages are written anew (index_repair.py), and damaged bytes are set aside (renamed or
copied), never deleted. After a repair that is `done` a start succeeds: the directory has been
checked again. An interrupted repair can be repeated. Must not know the command line. Must not judge
damage itself (directory_check.py).
"""

from __future__ import annotations

import os

import msgspec

from penstock.model.limits import MIB
from penstock.storage.directory_check import (
    Damage,
    DirectoryCheck,
    SealedFile,
    check_directory,
    locked_directory,
)
from penstock.storage.file_identity import zero_other_head
from penstock.storage.frames import POSITION_BITS
from penstock.storage.history import HistoryFile, history_name
from penstock.storage.index_repair import Repair, free_name, repair_index
from penstock.storage.journal_files import JournalFile, journal_name
from penstock.storage.offline import summary
from penstock.storage.recovery import cut_tail
from penstock.storage.segments import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    TornTail,
    encode_header,
    first_not_zero,
    list_segments,
    segment_name,
)
from penstock.storage.stopped_file import STOPPED_NAME
from penstock.storage.vfs import ZERO_STEP_BYTES, Vfs, remove_if_there

_FRESH_BYTES = MIB
"""Size of a segment made here: room for the first frames, even on a full disk."""


class _RepairPlan(msgspec.Struct):
    """The changes to make. `segments` maps each log file to its new name, and `lost` lists what the
    log loses. `fresh` is the number of an empty segment to create because the log has to begin with
    it, and `fresh_seq` is its first frame. `files` are damaged history and journal files, each with
    its path and its new name."""

    segments: dict[str, str] = {}
    fresh: int = 0
    fresh_seq: int = 1
    files: list[tuple[HistoryFile | JournalFile, str, str]] = []
    lost: list[str] = []

    @property
    def set_aside(self) -> dict[str, str]:
        return self.segments | {path: aside for _, path, aside in self.files if aside}


def repair(
    vfs: Vfs, directory: str, *, dry_run: bool = True, set_damage_aside: bool = False
) -> Repair:
    """Cuts a torn tail, and rewrites history files whose batches hide messages. Only explains other
    damage, unless `set_damage_aside` says to go on without the unreadable bytes."""
    with locked_directory(vfs, directory):
        found = check_directory(vfs, directory)
        is_index = found.damage is not None and found.damage == found.index_damage
        if not (is_index or found.hidden) or any(file.refuses_start for file in found.files):
            return _repair(vfs, directory, found, dry_run, set_damage_aside)
        hidden = [str(each) for each in found.hidden]
        index = msgspec.structs.replace(
            repair_index(vfs, directory, dry_run=dry_run, accept_loss=set_damage_aside),
            damage=found.index_damage,
            found=hidden,
        )
        if not index.done:
            return index
        left = check_directory(vfs, directory)
        rest = _repair(vfs, directory, left, dry_run, set_damage_aside)
        if left.damage is None and not left.torn:
            return index
        return msgspec.structs.replace(
            rest,
            explanation=f"{index.explanation} This was done. {rest.explanation}",
            set_aside=index.set_aside | rest.set_aside,
            lost=[*index.lost, *rest.lost],
            found=hidden if rest.done else [],
        )


def _repair(
    vfs: Vfs, directory: str, found: DirectoryCheck, dry_run: bool, set_damage_aside: bool
) -> Repair:
    """Repairs everything but the index, which is sound or cannot be repaired yet."""
    damage = found.damage
    if damage is None:
        if not dry_run:
            _cut(vfs, found.torn)
        return Repair(done=not dry_run, cut=found.torn, explanation=_explain_torn(found))
    hopeless = [
        file
        for file in found.files
        if file.refuses_start and file.kind not in ("history", "journal")
    ]
    if hopeless:
        explanation = _explain_hopeless(hopeless)
        return Repair(done=False, damage=damage, explanation=explanation, possible=False)
    plan = _plan(vfs, directory, found)
    explanation = _explain_damage(found)
    done = set_damage_aside and not dry_run
    if done:
        _carry_out(vfs, directory, found, plan)
        left = check_directory(vfs, directory)
        if left.damage is not None:
            done, damage = False, left.damage
            explanation = f"Set aside, but a start is still refused: {_describe(damage)}."
        found.files = left.files  # a file that now has the right length may have readable batches
    return Repair(
        done=done,
        cut=found.torn,
        damage=damage,
        set_aside=plan.set_aside,
        explanation=explanation,
        lost=[*_lost_files(found, plan), *plan.lost],
    )


# The plan


def _plan(vfs: Vfs, directory: str, found: DirectoryCheck) -> _RepairPlan:
    plan = _RepairPlan()
    named: dict[str, HistoryFile | JournalFile] = {}
    named |= {history_name(file.number): file for file in found.history}
    named |= {journal_name(file.number): file for file in found.journal}
    # The journal's positions must go on rising.
    plan.fresh_seq = 1 + max((file.last >> POSITION_BITS for file in found.journal), default=0)
    for file in found.files:
        if file.refuses_start:
            aside = free_name(vfs, file.path) if file.state == "damaged" else ""
            plan.files.append((named[os.path.basename(file.path)], file.path, aside))
    stopped = os.path.join(directory, STOPPED_NAME)
    if found.log_damage is not None and not _is_stopped_file(found.log_damage):
        _plan_log(vfs, directory, found.first_segment, found.log_damage, plan)
    if found.log_damage is not None and found.is_stopped:
        # After the repair the log no longer ends where the STOPPED file says.
        plan.segments[stopped] = free_name(vfs, stopped)
    return plan


def _is_stopped_file(damage: Damage) -> bool:
    return os.path.basename(damage.path) == STOPPED_NAME


def _plan_log(vfs: Vfs, directory: str, first: int, damage: Damage, plan: _RepairPlan) -> None:
    """Sets the damaged segment and all later ones aside: records after a gap cannot be replayed."""
    kept = 0
    for number, path in list_segments(vfs, directory):
        if number < first:
            continue
        if path < damage.path or _keeps_beginning(path, damage):
            kept += 1
        if path >= damage.path:
            plan.segments[path] = free_name(vfs, path)
            plan.lost += _lost_in_segment(vfs, number, path, damage)
    if not kept:
        plan.fresh = first
        plan.lost.append(
            f"all of the log from segment {first} on: the broker goes back to the snapshot, the "
            f"state at the end of segment {first - 1}"
            if first > 1
            else "all of the log, and nothing was sealed: the broker starts empty"
        )


def _lost_files(found: DirectoryCheck, plan: _RepairPlan) -> list[str]:
    given_up = {path for _, path, _ in plan.files}
    return [
        f"{os.path.basename(file.path)}: {each}"
        for file in found.files
        if file.path in given_up
        for each in file.lost
    ]


def _keeps_beginning(path: str, damage: Damage) -> bool:
    return path == damage.path and damage.position >= SEGMENT_HEADER_BYTES


def _lost_in_segment(vfs: Vfs, number: int, path: str, damage: Damage) -> list[str]:
    seen = summary(number, path, vfs.read_file(path))
    name = os.path.basename(path)
    if _keeps_beginning(path, damage):
        behind = f", of which {seen.frames_behind} frames are whole" if seen.frames_behind else ""
        return [f"{name}: everything from byte {damage.position} on{behind}"]
    if seen.first_seq:
        return [f"{name}: {seen.records} records in {seen.frames} frames"]
    is_spare = seen.state == "spare" and path != damage.path
    return [] if is_spare else [f"{name}: all of it; its header cannot be read"]


# Carrying it out


def _cut(vfs: Vfs, torn: list[TornTail]) -> None:
    for tail in torn:
        cut_tail(vfs, tail)


def _carry_out(vfs: Vfs, directory: str, found: DirectoryCheck, plan: _RepairPlan) -> None:
    """Works on the log from its end, so that after an interruption the same damage is found."""
    _cut(vfs, found.torn)
    for file, path, aside in plan.files:
        _replace_file(vfs, file, path, aside)
    for path, aside in sorted(plan.segments.items(), reverse=True):
        if found.log_damage is not None and _keeps_beginning(path, found.log_damage):
            data = vfs.read_file(path)
            vfs.write_file_atomically(aside, data)
            position = found.log_damage.position
            cut_tail(vfs, TornTail(path, position, len(data) - position))
        else:
            vfs.rename(path, aside)
    vfs.fsync_dir(directory)
    if plan.fresh:
        salt = int.from_bytes(vfs.random_bytes(4), "little")
        header = encode_header(SegmentHeader(plan.fresh, plan.fresh_seq, salt))
        path = os.path.join(directory, segment_name(plan.fresh))
        vfs.write_file_atomically(path, header.ljust(_FRESH_BYTES, b"\0"))


def _replace_file(vfs: Vfs, file: HistoryFile | JournalFile, path: str, aside: str) -> None:
    """Puts a file of the right length in the place of a damaged or missing one.

    It has the old file's bytes, and zeros behind them. A batch that is not among them fails its
    checksum when it is read, and only then. A head that is not this file's becomes zeros, as a sign
    that the file was given up.
    """
    temporary = f"{path}.tmp"
    remove_if_there(vfs, temporary)
    fd = vfs.open(temporary, create=True)
    try:
        if aside:
            _copy(vfs, path, fd, file.size)
        vfs.truncate(fd, file.size)
        zero_other_head(vfs, fd, file)
        vfs.sync(fd)
    finally:
        vfs.close(fd)
    if aside:
        vfs.rename(path, aside)
    vfs.rename(temporary, path)


def _copy(vfs: Vfs, path: str, target: int, size: int) -> None:
    """Copies at most `size` bytes. Leaves zeros out, since history files have holes."""
    source = vfs.open_read(path)
    try:
        at = 0
        while at < size and (data := vfs.read_at(source, min(ZERO_STEP_BYTES, size - at), at)):
            if first_not_zero(data, 0) is not None:
                vfs.write_at(target, [data], at)
            at += len(data)
    finally:
        vfs.close(source)


# The explanation


def _explain_torn(found: DirectoryCheck) -> str:
    damaged = [file for file in found.files if file.state != "sound"]
    if found.torn:
        places = ", ".join(f"{tail.path} at byte {tail.position}" for tail in found.torn)
        text = (
            f"A crash interrupted a write: {places}. With fsync mode commit, nothing acknowledged "
            "is in it; the next start cuts it off by itself."
        )
    else:
        text = "A start succeeds." if damaged else "All is sound; there is nothing to repair."
    for file in damaged:
        text += (
            f" {_describe(file.damage)}. No start is refused for it; {_consequence(file)}: restore "
            "the file from a copy that has it. It cannot be repaired."
        )
    return text


def _explain_hopeless(files: list[SealedFile]) -> str:
    damage = " ".join(f"{_describe(file.damage)}." for file in files)
    return (
        f"{damage} This cannot be repaired: the content of the file is nowhere else. Restore the "
        "whole data directory from a copy; a snapshot alone will do if the copy has one of the "
        "same name."
    )


def _explain_damage(found: DirectoryCheck) -> str:
    sentences = [
        f"{_describe(file.damage)}. Restore the file from a copy that has it. Otherwise an empty "
        f"one can take its place: the broker then starts, and {_consequence(file)}."
        for file in found.files
        if file.refuses_start
    ]
    if found.log_damage is not None and _is_stopped_file(found.log_damage):
        sentences.append(
            f"{_describe(found.log_damage)}. It holds no messages: it says where the log ended "
            "when the broker stopped. Restore it from a copy made since then if there is one. "
            "Otherwise it can be set aside, under a name that ends in .damaged: the log stays as "
            "it is and is judged as after a kill, so a log that was cut short since the stop is "
            "not noticed."
        )
    elif found.log_damage is not None:
        sentences.append(
            f"{_describe(found.log_damage)}. This is no torn write: acknowledged messages and acks "
            "are in it. Restore the file from a copy if there is one. Otherwise the log can be "
            "ended before the damage: everything from there on is kept beside it under names that "
            "end in .damaged, and is lost to the broker."
        )
    return " ".join(sentences)


def _consequence(file: SealedFile) -> str:
    if file.kind == "journal":
        return "the rows in it cannot be read"
    if file.kind == "staged":
        return "its batch is not stored any further, or has to be staged again"
    return "the groups that need its messages wait"


def _describe(damage: Damage) -> str:
    return f"{damage.path} is damaged at byte {damage.position}: {damage.detail}"
