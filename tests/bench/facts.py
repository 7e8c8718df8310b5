"""How fast do processes append facts while a reader polls, and how long does the reader wait?

    python tests/bench/facts.py [--processes 4] [--facts 2000] [--root DIRECTORY]

Every append is one file with one fact. Exits with 1 if a fact is lost or doubled, or if reader or writer meets an error.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from assay.schemas.facts import Measurement
from assay.warehouse.database import connect
from assay.warehouse.facts import FactStore


def write(root: Path, writer: int, facts: int) -> None:
    store = FactStore(root)
    for number in range(facts):
        store.append("measurement", [Measurement(
            artifact_digest=f"{writer:02d}{number:062d}", base_digest="0" * 64, protocol_digest="1" * 64, suite="divergence", metric="kl_mean_nats",
            value=number / 7, unit="nats", n=8192, standard_error=0.001, run=f"run{writer}", measured_at=datetime.now(UTC),
        )])  # fmt: skip


def bench(root: Path, processes: int, facts: int) -> bool:
    """Print the figures; returns whether every fact was there once, at every poll as many as before or more."""
    FactStore(root)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write, args=(root, writer, facts)) for writer in range(processes)]
    for writer in writers:
        writer.start()
    while not count(root):
        time.sleep(0.01)
    began, started_with, seen, waits = time.perf_counter(), count(root), [0], []
    while any(writer.is_alive() for writer in writers):
        asked = time.perf_counter()
        seen.append(count(root))
        waits.append(time.perf_counter() - asked)
    took = time.perf_counter() - began
    asked = time.perf_counter()
    total = count(root)
    last = time.perf_counter() - asked
    failed = [writer.exitcode for writer in writers if writer.exitcode]
    right = total == processes * facts and seen == sorted(seen) and not failed
    print(
        f"{processes} processes × {facts} appends: {total} facts, {'none lost or doubled' if right else f'WRONG: {seen}, exit codes {failed}'}"
    )
    timed = total - started_with
    print(
        f"appends: {timed / took:.0f} a second, {1000 * took * processes / timed:.1f} ms each"
        if timed
        else "appends: done before the reader was"
    )
    print(f"reader: {len(waits)} polls, longest {max(waits, default=0):.2f} s; {last:.2f} s for {total} files with nobody writing")
    merged = time.perf_counter()
    FactStore(root).compact(older_than=datetime.now(UTC) - datetime.now(UTC), threshold=0)
    merged, asked = time.perf_counter() - merged, time.perf_counter()
    right = count(root) == total and right
    print(f"compacted in {merged:.2f} s; then {time.perf_counter() - asked:.2f} s to read")
    return right


def count(root: Path) -> int:
    """Facts that the view shows: as many rows as distinct artifacts, or a fact is doubled."""
    with connect(root) as warehouse:
        ((rows, distinct),) = warehouse.sql("SELECT count(*), count(DISTINCT artifact_digest) FROM latest").fetchall()
    if rows != distinct:
        raise RuntimeError(f"{rows} rows of {distinct} facts")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--facts", type=int, default=2000, help="per process")
    parser.add_argument("--root", type=Path, help="an empty directory; a temporary one when left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(0 if bench(options.root or Path(temporary), options.processes, options.facts) else 1)
