"""`python -m tests.soak`, which scripts/soak runs."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import Soak, SoakFailed


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; printed")
    parser.add_argument("--data", type=Path, default=None, help="a new directory")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    directory = options.data or Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    if directory.exists() and any(directory.iterdir()):
        parser.error(f"{directory} is not empty")
    print(f"seed {seed}, directory {directory}", flush=True)
    soak = Soak(directory, seed, lambda line: print(line, flush=True))
    try:
        soak.run(options.seconds)
    except (SoakFailed, AssertionError, OSError) as error:
        print(soak.figures())
        print(f"FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        print(f"kept: {directory} (history.jsonl, broker.log, data)", file=sys.stderr)
        return 1
    print(soak.figures())
    print(f"all promises held for {options.seconds:.0f} s; seed {seed}")
    if options.data is None:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
