"""The command line of the benchmarks: chooses the loads, the runs and the output."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.cores import choose_cores
from bench.generators import missing_tools
from bench.loads import (
    access,
    batch,
    cache_http,
    cache_socket,
    cycle,
    durable_streams,
    fanout,
    isolation,
    latency,
    memory,
    pipelines,
    produce,
    restart,
    scale,
    sdk_socket,
    spark,
    stalled,
    tenants,
    transactions,
)
from bench.machine import describe_machine
from bench.report import write_again, write_results
from bench.rows import BenchFailed, Row, text_table
from bench.setting import Setting

LOADS: dict[str, Callable[[Setting], list[Row]]] = {
    "produce": produce.measure,
    "batch": batch.measure,
    "cycle": cycle.measure,
    "transactions": transactions.measure,
    "access": access.measure,
    "tenants": tenants.measure,
    "scale": scale.measure,
    "memory": memory.measure,
    "restart": restart.measure,
    "isolation": isolation.measure,
    "fanout": fanout.measure,
    "durable_streams": durable_streams.measure,
    "latency": latency.measure,
    "stalled": stalled.measure,
    "cache_http": cache_http.measure,
    "cache_socket": cache_socket.measure,
    "sdk_socket": sdk_socket.measure,
    "spark": spark.measure,
    "pipelines": pipelines.measure,
}
OUT = Path(__file__).with_name("out")
MIN_RUNS = 3


def main() -> int:
    options = _parse()
    OUT.mkdir(exist_ok=True)
    out = Path(tempfile.mkdtemp(dir=OUT))
    try:
        return _run(options, _setting(options, out))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure the broker beside its baselines."
    )
    parser.add_argument("loads", nargs="*", metavar="load", help=f"of: {', '.join(LOADS)}")
    parser.add_argument("--runs", type=int, help=f"{MIN_RUNS} unless --quick")
    parser.add_argument("--quick", action="store_true", help="short and small: does it work?")
    parser.add_argument(
        "--write", action="store_true", help="write bench/RESULTS.md, all of it or the loads named"
    )
    options = parser.parse_args()
    unknown = [name for name in options.loads if name not in LOADS]
    if unknown:
        parser.error(f"no such load: {', '.join(unknown)}; there are {', '.join(LOADS)}")
    options.runs = options.runs or (1 if options.quick else MIN_RUNS)
    if options.write and (options.quick or options.runs < MIN_RUNS):
        parser.error(f"--write takes {MIN_RUNS} runs or more, and no --quick")
    return options


def _setting(options: argparse.Namespace, out: Path) -> Setting:
    cores, missing = choose_cores(), tuple(missing_tools())
    if options.quick:
        return Setting(cores, out, options.runs, 2.0, 100_000, missing)
    return Setting(cores, out, options.runs, missing=missing)


def _run(options: argparse.Namespace, setting: Setting) -> int:
    with setting.broker("probe") as broker:
        fsync_mode = broker.fsync_mode()
    machine = describe_machine(setting.cores, setting.out, fsync_mode)
    for name, value in machine.items():
        print(f"{name}: {value}")
    rows: list[Row] = []
    failed = False
    for name in options.loads or LOADS:
        try:
            rows += LOADS[name](setting)
        except BenchFailed as error:
            failed = True
            print(f"{name} failed: {error}", file=sys.stderr)
        finally:
            _clear(setting.out)
    print(f"\n{text_table(rows)}")
    if options.write and not failed:
        command = shlex.join(["scripts/bench", *sys.argv[1:]])
        path = Path(__file__).with_name("RESULTS.md")
        if options.loads:
            write_again(path, command, machine, rows)
        else:
            write_results(path, command, machine, rows, setting.runs)
    return 1 if failed else 0


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
