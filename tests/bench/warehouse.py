"""How fast does the warehouse answer when it is large? On facts that are made up for this bench alone and say nothing about any model.

    python tests/bench/warehouse.py [--scale 1.0] [--root DIRECTORY]

At scale 1: 40 experiments of 60 variants, 10 million items, 1 million measurements under 12 protocols. Prints the seconds of filling a database in
memory and of its claims, of publishing the file, and of questions to the published file, which has the rows of the claims (the middle of 5, each on a
connection of its own, opened before), by the clock and of CPU: the smaller of the two is what a machine takes on which nothing else runs. Exits with 1 where that is more than 0.3 s for a scorecard,
or 1 s for the claims.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
from duckdb import DuckDBPyConnection

from assay.schemas.metrics import METRICS
from assay.warehouse.database import connect, snapshot
from assay.warehouse.facts import FactStore, file_schema

EXPERIMENTS, VARIANTS, SEEDS = 40, 60, (0, 1)
ITEM_METRICS = {"divergence": ("kl_mean_nats", "nll_mean_nats"), "choice": ("accuracy/piqa", "accuracy/mmlu"), "arithmetic": ("pass_at_1/0.7",), "generation": ("score/asdiv",)}  # fmt: skip
SLICES = {"divergence": ("token_class", 6), "choice": ("task", 6), "generation": ("task", 3), "arithmetic": ("temperature", 3), "distribution": ("temperature", 3), "needle": ("needle", 15)}  # fmt: skip
RUNS = 4  # of timings
TARGETS = {"scorecard of one experiment": 0.3, "scorecard of all": 0.3, "claims": 1.0, "claims, computed": 1.0}
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def make_facts(root: Path, scale: float) -> None:
    """Write made-up facts: as many experiments and variants at every scale, fewer items and slices at a smaller one."""
    FactStore(root)
    protocols = {
        (suite, seed): digest(suite, seed)
        for suite in METRICS
        for seed in (SEEDS if suite in ITEM_METRICS else (0,))
        if suite not in ("lm_eval", "recovery", "layers", "heads", "zeros", "speculation")
    }
    write(root, "protocol", [{"protocol_digest": key, "name": f"{suite}_{seed}", "suite": suite, "spec_json": json.dumps({"suite": suite, "seed": seed})} for (suite, seed), key in protocols.items()])  # fmt: skip
    write(root, "device", [{"device_digest": digest("device", at), "kind": "cpu", "name": f"cpu {at}", "cores": 2, "memory_bytes": 2**33, "torch_version": "0"} for at in (0, 1)])  # fmt: skip
    write(
        root,
        "run",
        [{"run": f"r{at}", "started_at": NOON + timedelta(days=at), "experiment": None, "trigger": "test"} for at in range(RUNS)],
    )
    names = [f"e{at:02d}" for at in range(EXPERIMENTS)]
    slugs = ["base", *(f"v{at:02d}" for at in range(1, VARIANTS))]
    write(root, "experiment", [{"experiment": name, "question": "?", "axes": ["axis"], "variants": slugs, "spec_json": "{}", "declared_at": NOON} for name in names])  # fmt: skip
    artifacts = {(name, slug): digest(name if slug != "base" else "", slug) for name in names for slug in slugs}
    write(root, "variant", [
        {"experiment": name, "variant": slug, "base": "made_up", "artifact_digest": key, "target_digest": key, "checkpoint_digest": key,
         "spec_json": "[]" if slug == "base" else "[1]", "recorded_at": NOON}
        for (name, slug), key in artifacts.items()
    ])  # fmt: skip
    write(root, "variant_axis", [{"experiment": name, "variant": slug, "axis": "axis", "option": slug} for name, slug in artifacts])
    base, generator = digest("", "base"), np.random.default_rng(0)
    distinct = list(dict.fromkeys(artifacts.values()))
    for at, chunk in enumerate(distinct[start : start + 240] for start in range(0, len(distinct), 240)):
        rows = [row for artifact in chunk for row in measurements(artifact, base, protocols, scale)]
        frame = pl.DataFrame(rows, schema_overrides=dict(file_schema("measurement")), infer_schema_length=None)
        publish(root, "measurement", frame.with_columns(value=pl.Series(generator.random(len(frame)))), at)
        publish(root, "item", items(chunk, protocols, scale, generator), at)


def measurements(artifact: str, base: str, protocols: dict[tuple[str, int], str], scale: float) -> Iterator[dict[str, Any]]:
    """About 426 rows of one artifact at scale 1."""
    for (suite, seed), protocol in protocols.items():
        common = {"artifact_digest": artifact, "base_digest": base, "protocol_digest": protocol, "suite": suite, "unit": "1", "n": 1000, "standard_error": 0.01, "status": "ok", "seed": seed}  # fmt: skip
        if suite == "speed":
            for metric in METRICS[suite]:
                for run in range(RUNS):
                    for device in (0, 1):
                        yield {**common, "metric": metric, "device_digest": digest("device", device), "threads": 2, "run": f"r{run}", "measured_at": NOON + timedelta(days=run), "path": "native, made-up weights"}  # fmt: skip
            continue
        kind, parts = SLICES.get(suite, ("all", 0))
        slices = [("all", "all"), *((kind, f"part {at}") for at in range(max(1, round(parts * scale)) if parts else 0))]
        for metric in METRICS[suite]:
            for slice_kind, part in slices:
                yield {
                    **common,
                    "metric": metric,
                    "slice_kind": slice_kind,
                    "slice": part,
                    "run": "r0",
                    "measured_at": NOON,
                    "path": "dense",
                }


def items(artifacts: list[str], protocols: dict[tuple[str, int], str], scale: float, generator: np.random.Generator) -> pl.DataFrame:
    """About 4,240 rows of each artifact at scale 1: windows, answers that are right or wrong, shares of samples."""
    each = max(2, round(353 * scale))
    kinds = [
        (suite, protocol, metric) for (suite, _), protocol in protocols.items() if suite in ITEM_METRICS for metric in ITEM_METRICS[suite]
    ]
    one = pl.DataFrame(
        {"suite": [kind[0] for kind in kinds], "protocol_digest": [kind[1] for kind in kinds], "metric": [kind[2] for kind in kinds]}
    ).join(pl.DataFrame({"item": np.arange(each)}), how="cross")
    frame = pl.DataFrame({"artifact_digest": artifacts}).join(one, how="cross")
    drawn = pl.Series(generator.random(len(frame)))
    return frame.with_columns(
        value=pl.when(pl.col("suite") == "choice").then((drawn < 0.4).cast(pl.Float64)).otherwise(drawn), run=pl.lit("r0")
    )


def write(root: Path, table: str, rows: list[dict[str, Any]]) -> None:
    publish(
        root, table, pl.DataFrame(rows, schema_overrides={name: kind for name, kind in file_schema(table).items() if name in rows[0]}), 0
    )


def publish(root: Path, table: str, frame: pl.DataFrame, number: int) -> None:
    """As ``FactStore.append`` would, without a model for each row."""
    missing = [pl.lit(None, kind).alias(name) for name, kind in file_schema(table).items() if name not in frame.columns]
    path = root / table / "2026-11" / f"made_up_{number}.parquet"
    path.parent.mkdir(exist_ok=True)
    frame.with_columns(missing).with_columns(written_at=pl.lit(NOON)).select(list(file_schema(table))).write_parquet(path)


def timed(name: str, query: str, connect: Callable[[], AbstractContextManager[DuckDBPyConnection]], repeats: int = 5) -> bool:
    """Print the middle seconds of ``query``, by the clock and of CPU, each on what ``connect`` gives, and how many rows it has; whether it is quick."""
    seconds, rows = [], 0
    for _ in range(repeats):
        with connect() as connection:
            began = now()
            rows = len(connection.sql(query).fetchall())
            seconds.append(np.subtract(now(), began))
    clock, cpu = np.median(seconds, axis=0)
    limit = TARGETS.get(name)
    met = limit is None or min(clock, cpu) <= limit
    told = "" if limit is None else f"   target {limit} s: {'met' if met else 'MISSED'}"
    print(f"{name:32} {clock:8.3f} s, {cpu:8.3f} s of CPU   {rows:,} rows{told}", flush=True)
    return met


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def bench(root: Path, scale: float) -> bool:
    """Print the figures; returns whether each target was met."""
    facts, target = root / "facts", root / "warehouse.duckdb"
    if not facts.exists():
        began = time.perf_counter()
        make_facts(facts, scale)
        print(f"made up in {time.perf_counter() - began:.1f} s")
    began = now()
    with connect(facts) as connection:
        clock, cpu = np.subtract(now(), began)
        items, measured = connection.sql("SELECT (SELECT count(*) FROM item), (SELECT count(*) FROM measurement)").fetchall()[0]
        print(f"{'connect':32} {clock:8.3f} s, {cpu:8.3f} s of CPU   {items:,} items, {measured:,} measurements", flush=True)
        good = timed("claims, computed", "FROM claims", lambda: nullcontext(connection))
    began = now()
    snapshot(facts, target)
    clock, cpu = np.subtract(now(), began)
    print(f"{'snapshot':32} {clock:8.3f} s, {cpu:8.3f} s of CPU   {target.stat().st_size / 2**20:,.0f} MiB", flush=True)
    questions = {
        "scorecard of one experiment": "FROM scorecard WHERE experiment = 'e07'",
        "scorecard of all": "FROM scorecard",
        "the experiment's own table": "FROM e07",
        "versus_base of one experiment": "FROM versus_base WHERE experiment = 'e07'",
        "a metric by slice": "FROM by_slice WHERE experiment = 'e07' AND metric = 'kl_mean_nats'",
        "accuracy of one experiment": "FROM accuracy WHERE experiment = 'e07'",
        "paired, two variants": "FROM paired WHERE experiment = 'e07' AND variant = 'v05' AND other = 'base'",
        "paired, all against the base": "FROM paired WHERE experiment = 'e07' AND other = 'base'",
        "pareto": "FROM pareto WHERE experiment = 'e07'",
        "interaction": "FROM interaction WHERE experiment = 'e07'",
        "regression of one experiment": "FROM regression WHERE experiment = 'e07'",
        "noise_floor": "FROM noise_floor",
        "claims": "FROM claims",
    }
    for name, query in questions.items():
        good &= timed(name, query, lambda: duckdb.connect(str(target), read_only=True))
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--root", type=Path, help="keeps the made-up facts and takes those that are there; a temporary directory otherwise")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(0 if bench(arguments.root or Path(temporary), arguments.scale) else 1)
