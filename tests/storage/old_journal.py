"""A journal as it was before `produced_at` and `delivered_at`: files of 16 columns, and a manifest
that does not say how many there are."""

from __future__ import annotations

import os
import zlib

import msgspec
import pyarrow as pa
import pytest

from penstock.storage import journal_files
from penstock.storage.journal_files import JournalFile, JournalReader, JournalWriter, journal_name
from penstock.storage.journal_rows import JOURNAL_SCHEMA
from penstock.storage.manifest import MANIFEST_NAME, load_manifest
from penstock.storage.vfs import Vfs

OLD_SCHEMA = pa.schema(list(JOURNAL_SCHEMA)[:16])


def make_old(vfs: Vfs, directory: str) -> int:
    """Writes every file of the journal again, as an older broker would have; returns how many."""
    manifest = load_manifest(vfs, directory)
    assert manifest is not None
    files = [_rewritten(vfs, directory, file) for file in manifest.journal.files]
    plain = msgspec.to_builtins(manifest)
    plain["journal"]["files"] = [
        [file.number, file.size, [list(msgspec.to_builtins(ref))[:10] for ref in file.batches]]
        for file in files
    ]
    body = msgspec.json.encode(plain)
    head = b"PENSTOCK-MANIFEST 1 %08x\n" % zlib.crc32(body)
    vfs.write_file_atomically(os.path.join(directory, MANIFEST_NAME), head + body)
    return len(files)


def _rewritten(vfs: Vfs, directory: str, file: JournalFile) -> JournalFile:
    batches = [JournalReader(vfs, directory).batch(ref) for ref in file.batches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_files, "JOURNAL_SCHEMA", OLD_SCHEMA)
        writer = JournalWriter(vfs, directory, file.number)
        for batch in batches:
            writer.add(batch.select(OLD_SCHEMA.names))
        written = writer.finish()
    assert written is not None
    found = pa.ipc.open_file(
        pa.py_buffer(vfs.read_file(os.path.join(directory, journal_name(file.number))))
    )
    assert found.schema == OLD_SCHEMA
    return written
