"""The table of small thresholds names constants that exist, and lowers every copy of them."""

from __future__ import annotations

import pytest

from penstock.storage import history, history_reader, journal_files, seal, vacuum
from tests.thresholds import ENGINE, SERVER, SPARK, STORAGE, Threshold, lower, lowered

EVERY = (*STORAGE, *ENGINE, *SERVER, *SPARK)


def test_every_threshold_exists_and_is_set_back():
    before = (history.MAX_BATCH_ROWS, seal.seal.__defaults__)
    with lowered(EVERY):
        assert (history.MAX_BATCH_ROWS, seal.seal.__defaults__) != before
    assert (history.MAX_BATCH_ROWS, seal.seal.__defaults__) == before


def test_modules_that_imported_a_threshold_get_the_small_value_too():
    with lowered(STORAGE):
        assert vars(vacuum)["MAX_BATCH_ROWS"] == history.MAX_BATCH_ROWS
        assert vars(journal_files)["MAX_BATCH_BYTES"] == history.MAX_BATCH_BYTES
        assert history_reader.HistoryReader.__init__.__defaults__ == (history_reader.OPEN_FILES,)


def test_a_threshold_that_was_renamed_is_an_error():
    with pytest.raises(LookupError, match="NO_SUCH_ROWS"):
        lower((Threshold("storage.history", "NO_SUCH_ROWS", 1),))
