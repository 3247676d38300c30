"""Describes the machine of a run: cores, kernel, Python, disk, and the duration of a sync."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from statistics import median, quantiles

from bench.cores import Cores, look_around

SYNCS = 500
SYNC_BYTES = 8192


def describe_machine(cores: Cores, out: Path, fsync_mode: str) -> dict[str, str]:
    """Returns names and values in a fixed order, for the head of the results."""
    pinned = f"server on core {cores.server}, load on core {cores.load}"
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores; "
        + (pinned if cores.is_pinned else "nothing pinned: there is one core"),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "disk": f"{_file_system(out)}; fdatasync of {SYNC_BYTES // 1024} KiB: {_sync_times(out)}",
        "broker": f"fsync mode {fsync_mode}",
        "baselines": ", ".join([_version("wrk", "-v"), _version("redis-server", "--version")]),
        "before the start": look_around(cores),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(path: Path) -> str:
    """Returns the file system type of the mount that contains `path`."""
    best, kind = "", "unknown file system"
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for line in mounts:
        point, fs = line.split()[1:3]
        if path.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, fs
    return f"{kind} (memory, not a disk: nothing here is durable)" if kind == "tmpfs" else kind


def _sync_times(out: Path) -> str:
    """Measures syncs of blocks that were written before, as the broker's are."""
    path = out / "sync-probe"
    block = bytes(SYNC_BYTES)
    sync = getattr(os, "fdatasync", os.fsync)
    times = []
    with open(path, "wb", buffering=0) as file:
        file.write(block * SYNCS)
        os.fsync(file.fileno())
        for number in range(SYNCS):
            began = time.perf_counter()
            os.pwrite(file.fileno(), block, number * SYNC_BYTES)
            sync(file.fileno())
            times.append((time.perf_counter() - began) * 1000)
    path.unlink()
    return f"median {median(times):.2f} ms, p99 {quantiles(times, n=100)[98]:.2f} ms"


def _version(tool: str, flag: str) -> str:
    if shutil.which(tool) is None:
        return f"{tool} is missing"
    done = subprocess.run([tool, flag], capture_output=True, text=True, check=False)
    words = (done.stdout or done.stderr).split()
    version = next((w for w in words if any(c.isdigit() for c in w)), "")
    return f"{tool} {version.removeprefix('v=')}"
