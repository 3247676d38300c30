"""The `penstock` command."""

from __future__ import annotations

import sys

from penstock.server.serve import serve
from penstock.server.settings import load_settings


def main() -> None:
    import click

    sys.exit(0)


if __name__ == "__main__":
    flags = {}
    args = sys.argv[2:]
    while args:
        k = args.pop(0)[2:].replace("-", "_")
        flags[k] = True if k in ("memory", "allow_insecure_bind") else args.pop(0)
    s, _ = load_settings(flags, flags.pop("config", ""))
    serve(s, lambda a, e: print(a, flush=True))
