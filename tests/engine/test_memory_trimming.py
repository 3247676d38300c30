"""Memory that is free goes back to the system, where the C library can do that."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from array import array
from pathlib import Path
from penstock.engine.memory_trimming import trim_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

kept = [array("I", range(256)) for _ in range(100_000)]
last = kept[-1]
del kept
before = resident()
trim_memory()
print(before - resident())
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not Path("/proc/self/statm").exists(),
    reason="only glibc keeps what is free, and gives it back when told",
)
def test_what_lies_free_before_something_that_stays_is_given_back():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\d+", done.stdout.strip())
    assert int(done.stdout) > 50 * 2**20
