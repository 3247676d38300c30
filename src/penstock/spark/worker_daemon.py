"""The process that Spark's Python workers are forked from, as PySpark has it, but silent about a
Java that has hung up.

When a limit is reached or a query stopped, a worker still has rows to give, and PySpark's daemon
would print a traceback of each. Started by the launcher of `session_python`, or by its name in
`spark.python.daemon.module`. Must not import what starts threads: workers are forked from here.
"""

from __future__ import annotations

import os
import socket
import sys

from pyspark import daemon

_work = daemon.worker


def work(sock: socket.socket, authenticated: bool) -> int:
    """PySpark's `worker`. A code other than 0 ends the process, as the traceback would have."""
    try:
        return _work(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        return 1


if __name__ == "__main__":
    # The launcher's -P keeps a json.py or penstock.py in the working directory from being taken for
    # the real one. A user's own modules there are found all the same, after everything else.
    if sys.flags.safe_path:
        sys.path.append(os.getcwd())
    daemon.worker = work
    daemon.manager()
