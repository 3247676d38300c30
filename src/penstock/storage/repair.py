"""Making a stopped broker's directory fit to start, at a price that is said beforehand.

Invariant: nothing is changed unless told to; a torn tail is cut as a start would cut it, batches
that hide messages are written anew (mending.py), and what is damaged is set aside (renamed or
copied), never deleted. After a repair that is `done` a start succeeds: the directory has been
judged again. Interrupted, it can be done again. Must not know the command line, nor judge by itself
(audit.py).
"""

from __future__ import annotations

import os

import msgspec

from penstock.model.limits import MIB
from penstock.storage.audit import Audit, Damage, SealedFile, alone_in, audit
from penstock.storage.file_identity import zero_other_head
from penstock.storage.frames import POSITION_BITS
from penstock.storage.history import HistoryFile, history_name
from penstock.storage.journal_files import JournalFile, journal_name
from penstock.storage.mending import Mending, free_name, mend_index
from penstock.storage.offline import summary
from penstock.storage.recovery import cut_tail
from penstock.storage.segments import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    Tail,
    encode_header,
    first_not_zero,
    list_segments,
    segment_name,
)
from penstock.storage.stopped import STOPPED_NAME
from penstock.storage.vfs import ZERO_STEP_BYTES, Vfs, remove_if_there

_FRESH_BYTES = MIB
"""Of a segment made here: room for the first frames on a disk that is full."""


class Repair(msgspec.Struct, frozen=True):
    """What was done, or would be. `set_aside` maps each file to the one that keeps its bytes,
    `lost` says what the broker then does not have, `found` which messages can be reached again.
    Not `possible`: nothing here can help."""

    done: bool
    cut: list[Tail]
    damage: Damage | None
    set_aside: dict[str, str]
    explanation: str
    lost: list[str] = []
    possible: bool = True
    found: list[str] = []


class _Plan(msgspec.Struct):
    """`lost` is what the log loses; `fresh` is the segment that is made anew, empty, since the
    log has to begin with it, and `fresh_seq` its first frame. `files` are files of history and
    journal as the manifest knows them, with their path and their new name."""

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
    """Cuts a torn tail, and writes files of history anew whose batches hide messages. Other damage
    is only explained, unless `set_damage_aside` says to go on without what cannot be read."""
    with alone_in(vfs, directory):
        found = audit(vfs, directory)
        is_index = found.damage is not None and found.damage == found.index_damage
        if not (is_index or found.hidden) or any(file.refuses_start for file in found.files):
            return _repair(vfs, directory, found, dry_run, set_damage_aside)
        mended = mend_index(vfs, directory, dry_run=dry_run, accept_loss=set_damage_aside)
        if not mended.done:
            return _repair_of_index(found, mended)
        left = audit(vfs, directory)
        rest = _repair(vfs, directory, left, dry_run, set_damage_aside)
        if left.damage is None and not left.torn:
            return _repair_of_index(found, mended)
        return msgspec.structs.replace(
            rest,
            explanation=f"{mended.explanation} This was done. {rest.explanation}",
            set_aside=mended.set_aside | rest.set_aside,
            lost=[*mended.lost, *rest.lost],
            found=[str(each) for each in found.hidden] if rest.done else [],
        )


def _repair_of_index(found: Audit, mended: Mending) -> Repair:
    return Repair(
        done=mended.done,
        cut=[],
        damage=found.index_damage,
        set_aside=mended.set_aside,
        explanation=mended.explanation,
        lost=mended.lost,
        possible=mended.possible,
        found=[str(each) for each in found.hidden],
    )


def _repair(
    vfs: Vfs, directory: str, found: Audit, dry_run: bool, set_damage_aside: bool
) -> Repair:
    """Deals with all but the index, which is sound or has to wait."""
    damage = found.damage
    if damage is None:
        if not dry_run:
            _cut(vfs, found.torn)
        return Repair(not dry_run, found.torn, None, {}, _explain_torn(found))
    hopeless = [file for file in found.files if _is_hopeless(file)]
    if hopeless:
        return Repair(False, [], damage, {}, _explain_hopeless(hopeless), possible=False)
    plan = _plan(vfs, directory, found)
    explanation = _explain_damage(found)
    done = set_damage_aside and not dry_run
    if done:
        _carry_out(vfs, directory, found, plan)
        left = audit(vfs, directory)
        if left.damage is not None:
            done, damage = False, left.damage
            explanation = f"Set aside, but a start is still refused: {_said(damage)}."
        found.files = left.files  # more may be readable in a file of the right length
    lost = [*_lost_of_history(found, plan), *plan.lost]
    return Repair(done, found.torn, damage, plan.set_aside, explanation, lost)


# What is to be done


def _is_hopeless(file: SealedFile) -> bool:
    return file.refuses_start and file.kind not in ("history", "journal")


def _plan(vfs: Vfs, directory: str, found: Audit) -> _Plan:
    plan = _Plan()
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
        # The log no longer ends where it says.
        plan.segments[stopped] = free_name(vfs, stopped)
    return plan


def _is_stopped_file(damage: Damage) -> bool:
    return os.path.basename(damage.path) == STOPPED_NAME


def _plan_log(vfs: Vfs, directory: str, first: int, damage: Damage, plan: _Plan) -> None:
    """The damaged file and all after it: what follows a gap cannot be replayed."""
    kept = 0
    for number, path in list_segments(vfs, directory):
        if number < first:
            continue
        if path < damage.path or _keeps_beginning(path, damage):
            kept += 1
        if path >= damage.path:
            plan.segments[path] = free_name(vfs, path)
            plan.lost += _lost_of(vfs, number, path, damage)
    if not kept:
        plan.fresh = first
        plan.lost.append(
            f"all of the log from segment {first} on: the broker goes back to the snapshot, the "
            f"state at the end of segment {first - 1}"
            if first > 1
            else "all of the log, and nothing was sealed: the broker starts empty"
        )


def _lost_of_history(found: Audit, plan: _Plan) -> list[str]:
    given_up = {path for _, path, _ in plan.files}
    return [
        f"{os.path.basename(file.path)}: {each}"
        for file in found.files
        if file.path in given_up
        for each in file.lost
    ]


def _keeps_beginning(path: str, damage: Damage) -> bool:
    return path == damage.path and damage.position >= SEGMENT_HEADER_BYTES


def _lost_of(vfs: Vfs, number: int, path: str, damage: Damage) -> list[str]:
    seen = summary(number, path, vfs.read_file(path))
    name = os.path.basename(path)
    if _keeps_beginning(path, damage):
        behind = f", of which {seen.frames_behind} frames are whole" if seen.frames_behind else ""
        return [f"{name}: everything from byte {damage.position} on{behind}"]
    if seen.first_seq:
        return [f"{name}: {seen.records} records in {seen.frames} frames"]
    is_spare = seen.state == "spare" and path != damage.path
    return [] if is_spare else [f"{name}: all of it; its header cannot be read"]


# Doing it


def _cut(vfs: Vfs, torn: list[Tail]) -> None:
    for tail in torn:
        cut_tail(vfs, tail)


def _carry_out(vfs: Vfs, directory: str, found: Audit, plan: _Plan) -> None:
    """The log from its end, so that an interruption leaves the same damage to be found again."""
    _cut(vfs, found.torn)
    for file, path, aside in plan.files:
        _replace_file(vfs, file, path, aside)
    for path, aside in sorted(plan.segments.items(), reverse=True):
        if found.log_damage is not None and _keeps_beginning(path, found.log_damage):
            vfs.write_file_atomically(aside, vfs.read_file(path))
            _zero_from(vfs, path, found.log_damage.position)
        else:
            vfs.rename(path, aside)
    vfs.fsync_dir(directory)
    if plan.fresh:
        salt = int.from_bytes(vfs.random_bytes(4), "little")
        header = encode_header(SegmentHeader(plan.fresh, plan.fresh_seq, salt))
        path = os.path.join(directory, segment_name(plan.fresh))
        vfs.write_file_atomically(path, header.ljust(_FRESH_BYTES, b"\0"))


def _zero_from(vfs: Vfs, path: str, position: int) -> None:
    fd = vfs.open(path)
    try:
        size = vfs.size(fd)
        for offset in range(position, size, ZERO_STEP_BYTES):
            vfs.zero_fill(fd, offset, min(ZERO_STEP_BYTES, size - offset))
        vfs.sync(fd)
    finally:
        vfs.close(fd)


def _replace_file(vfs: Vfs, file: HistoryFile | JournalFile, path: str, aside: str) -> None:
    """A file of the length the manifest says, with what there is of the old one's bytes: a batch
    that is not among them fails its checksum when it is read, and only then. A head that is not
    this file's becomes zeros, as a sign that the file was given up."""
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
    """At most `size` bytes. Zeros are left out: history has holes."""
    source = vfs.open_read(path)
    try:
        at = 0
        while at < size and (data := vfs.read_at(source, min(ZERO_STEP_BYTES, size - at), at)):
            if first_not_zero(data, 0) is not None:
                vfs.write_at(target, [data], at)
            at += len(data)
    finally:
        vfs.close(source)


# Saying it


def _explain_torn(found: Audit) -> str:
    damaged = [file for file in found.files if file.state != "sound"]
    if found.torn:
        places = ", ".join(f"{tail.path} at byte {tail.position}" for tail in found.torn)
        said = (
            f"A crash interrupted a write: {places}. With fsync mode commit, nothing acknowledged "
            "is in it; the next start cuts it off by itself."
        )
    else:
        said = "A start succeeds." if damaged else "All is sound; there is nothing to repair."
    for file in damaged:
        said += (
            f" {_said(file.damage)}. No start is refused for it; {_price(file)}: restore the file "
            "from a copy that has it. It cannot be repaired."
        )
    return said


def _explain_hopeless(files: list[SealedFile]) -> str:
    said = " ".join(f"{_said(file.damage)}." for file in files)
    return (
        f"{said} This cannot be repaired: what the file said is nowhere else. Restore the whole "
        "data directory from a copy; a snapshot alone will do if the copy has one of the same name."
    )


def _explain_damage(found: Audit) -> str:
    said = [
        f"{_said(file.damage)}. Restore the file from a copy that has it. Otherwise an empty one "
        f"can take its place: the broker then starts, and {_price(file)}."
        for file in found.files
        if file.refuses_start
    ]
    if found.log_damage is not None and _is_stopped_file(found.log_damage):
        said.append(
            f"{_said(found.log_damage)}. It holds no messages: it says where the log ended when "
            "the broker stopped. Restore it from a copy made since then if there is one. "
            "Otherwise it can be set aside, under a name that ends in .damaged: the log stays as "
            "it is and is judged as after a kill, so a log that was cut short since the stop is "
            "not noticed."
        )
    elif found.log_damage is not None:
        said.append(
            f"{_said(found.log_damage)}. This is no torn write: acknowledged messages and acks are "
            "in it. Restore the file from a copy if there is one. Otherwise the log can be ended "
            "before the damage: all from there on is kept beside it under names that end in "
            ".damaged, and what it says is lost to the broker."
        )
    return " ".join(said)


def _price(file: SealedFile) -> str:
    if file.kind == "journal":
        return "the rows in it cannot be read"
    if file.kind == "staged":
        return "its batch is not stored any further, or has to be staged anew"
    return "the groups that need its messages wait"


def _said(damage: Damage) -> str:
    return f"{damage.path} is damaged at byte {damage.position}: {damage.detail}"
