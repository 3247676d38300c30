"""Spark's daemon for Python workers, without tracebacks when Java closes a connection early.

Spark closes a worker's connection when a limit is reached or a query is stopped, while the worker
still has rows to send. PySpark's own daemon prints a traceback each time. Started by the launcher
of `sessions`, or by its name in `spark.python.daemon.module`. Must not import modules that
start threads: workers are forked from this process.
"""

from __future__ import annotations

import os
import socket
import sys

from pyspark import daemon

_work = daemon.worker


def work(sock: socket.socket, authenticated: bool) -> int:
    """Runs PySpark's `worker`. A result other than 0 ends the process, as an exception does."""
    try:
        return _work(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        return 1


if __name__ == "__main__":
    # The launcher's -P keeps a json.py or penstock.py in the working directory from hiding the
    # real one. The user's own modules there are still found, after everything else.
    if sys.flags.safe_path:
        sys.path.append(os.getcwd())
    daemon.worker = work
    daemon.manager()
