"""The entry point of the `penstock` command.

Invariant: if a package is missing, it says what to install. So it imports the commands last.
"""

from __future__ import annotations

import sys

EXTRA = frozenset(
    {"click", "fnv_hash_fast", "httptools", "prometheus_client", "pyarrow", "rich", "uvloop"}
)
"""The packages that the command needs and the bare SDK does not install."""


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
