"""The way into the `penstock` command.

Invariant: imports nothing that a bare install lacks before it can say what to install.
"""

from __future__ import annotations

import sys

EXTRA = frozenset(
    {
        "click",
        "fnv_hash_fast",
        "httptools",
        "prometheus_client",
        "pyarrow",
        "rich",
        "uvloop",
    }
)
"""What the command needs beside the SDK."""


def main() -> None:
    try:
        from penstock.cli.commands import penstock

        penstock(prog_name="penstock")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        print(
            f"Error: the penstock command needs {error.name}, which is not installed; "
            "install it with: pip install 'penstock[server]'",
            file=sys.stderr,
        )
        sys.exit(1)
