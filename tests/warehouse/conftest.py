"""A small warehouse whose answers were worked by hand, and the rows to make others."""

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from duckdb import DuckDBPyConnection

from assay.schemas.facts import (
    BudgetRow,
    DeviceRow,
    ExperimentRow,
    Item,
    LineageRow,
    Measurement,
    ProtocolRow,
    RunRow,
    StepRow,
    VariantAxisRow,
    VariantRow,
)
from assay.warehouse.database import connect
from assay.warehouse.facts import FactStore

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def fact_row(metric: str = "kl_mean_nats", value: float | None = 0.5, **changes: Any) -> Measurement:
    return Measurement(
        **{
            "artifact_digest": "a", "base_digest": "base", "protocol_digest": "div", "suite": "divergence", "metric": metric, "value": value,
            "unit": "nats", "n": 100, "run": "r1", "measured_at": NOON, **changes,
        }
    )  # fmt: skip


def variant_row(variant: str = "int4", *, steps: int = 1, **changes: Any) -> VariantRow:
    digest = changes.get("artifact_digest", variant)
    return VariantRow(
        **{
            "experiment": "quickstart", "variant": variant, "base": "tiny", "artifact_digest": digest, "target_digest": digest,
            "checkpoint_digest": digest, "spec_json": json.dumps([{"kind": "quantize"}] * steps),
            "recorded_at": NOON, **changes,
        }
    )  # fmt: skip


@pytest.fixture
def near() -> Callable[[list[tuple]], list[tuple]]:
    """Rows to compare others with: a sum that threads added in another order has other last digits."""
    return lambda rows: [tuple(pytest.approx(each, rel=1e-9, abs=1e-12, nan_ok=True) if isinstance(each, float) else each for each in row) for row in rows]  # fmt: skip


@pytest.fixture
def make_fact() -> Callable[..., Measurement]:
    return fact_row


@pytest.fixture
def make_variant() -> Callable[..., VariantRow]:
    return variant_row


@pytest.fixture
def store(tmp_path: Path) -> FactStore:
    return FactStore(tmp_path / "facts")


@pytest.fixture
def noon() -> datetime:
    return NOON


# KL and decode speed of (prune, quantize); a draft makes decoding 1.5 times as fast and changes no divergence.
KL = {("none", "none"): 0.0, ("depth4", "none"): 0.25, ("none", "int4"): 0.0625, ("depth4", "int4"): 0.5}
DECODE = {("none", "none"): 20.0, ("depth4", "none"): 24.0, ("none", "int4"): 25.0, ("depth4", "int4"): 27.0}
SIZE = {("none", "none"): 1000, ("depth4", "none"): 900, ("none", "int4"): 300, ("depth4", "int4"): 270}


@pytest.fixture
def quickstart(store: FactStore, quickstart_facts: Path) -> FactStore:
    """The experiment quickstart over prune × quantize × draft, measured in two runs; the second one made int4 decode slower."""
    shutil.copytree(quickstart_facts, store.root, dirs_exist_ok=True)
    return store


@pytest.fixture(scope="session")
def quickstart_warehouse(quickstart_facts: Path) -> Iterator[DuckDBPyConnection]:
    """A connection to those facts, for tests that add none."""
    with connect(quickstart_facts) as connection:
        yield connection


@pytest.fixture(scope="session")
def quickstart_facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = FactStore(tmp_path_factory.mktemp("quickstart") / "facts")
    steps = {"depth4": {"kind": "prune_depth", "layers": 4}, "int4": {"kind": "quantize", "format": "int4"}, "ngram": {"kind": "draft"}}
    store.append("protocol", [ProtocolRow(protocol_digest=each, name=each, suite=each, spec_json="{}") for each in ("divergence", "bytes", "acceptance", "speed", "speculation")])  # fmt: skip
    store.append(
        "device", [DeviceRow(device_digest="cpu0", kind="cpu", name="Some CPU", cores=2, memory_bytes=2**33, torch_version="2.13.0")]
    )
    store.append(
        "run", [RunRow(run=f"r{day}", started_at=NOON + timedelta(days=day), experiment="quickstart", trigger="test") for day in (1, 2)]
    )
    points = list(product(("none", "depth4"), ("none", "int4"), ("none", "ngram")))
    store.append("experiment", [ExperimentRow(experiment="quickstart", question="?", axes=["prune", "quantize", "draft"], variants=["__".join(point) for point in points], spec_json="{}", declared_at=NOON)])  # fmt: skip
    budgets = [
        BudgetRow(experiment="quickstart", variant="__".join(point), metric="kl_mean_nats", at_most=0.25, recorded_at=NOON)
        for point in points
    ]
    store.append("budget", budgets)
    for prune, quantize, draft in points:
        variant, options = f"{prune}__{quantize}__{draft}", {"prune": prune, "quantize": quantize, "draft": draft}
        target = f"t_{prune}_{quantize}"
        artifact = target if draft == "none" else f"{target}_ngram"
        spec = [steps[option] for option in options.values() if option != "none"]
        store.append("variant", [VariantRow(
            experiment="quickstart", variant=variant, base="tiny", artifact_digest=artifact, target_digest=target, checkpoint_digest=target,
            spec_json=json.dumps(spec), recorded_at=NOON,
        )])  # fmt: skip
        store.append("variant_axis", [VariantAxisRow(experiment="quickstart", variant=variant, axis=axis, option=option) for axis, option in options.items()])  # fmt: skip
        key = (prune, quantize)
        if draft == "none":
            rows = [fact_row("kl_mean_nats", KL[key], standard_error=0.01), fact_row("kl_p99_nats", 4 * KL[key]), fact_row("top1_agreement", 1 - KL[key] / 2, unit="1"), fact_row("perplexity", 10 + KL[key], unit="1"), fact_row("perplexity_delta", KL[key], unit="1")]  # fmt: skip
            rows += [
                fact_row("kl_mean_nats", KL[key] * factor, slice_kind="token_class", slice=name, n=50)
                for name, factor in (("digit", 2), ("other", 0.5))
            ]
            store.append("measurement", [row.model_copy(update={"artifact_digest": target, "base_digest": "t_none_none", "protocol_digest": "divergence"}) for row in rows], name=f"div_{target}")  # fmt: skip
            store.append("item", [Item(artifact_digest=target, protocol_digest="divergence", suite="divergence", item=at, metric="kl_mean_nats", value=KL[key] * part, run="r1") for at, part in enumerate((0.5, 1.0, 1.5, 1.0))], name=f"items_{target}")  # fmt: skip
            store.append("step", [StepRow(artifact_digest=target, key=f"k_{target}", kind="quantize" if quantize == "int4" else "prune_depth" if prune == "depth4" else "base", spec_json="{}", code_fingerprint="c", size_bytes=SIZE[key], build_seconds=SIZE[key] / 100, built_at=NOON)])  # fmt: skip
            if key != ("none", "none"):
                store.append("lineage", [LineageRow(artifact_digest=target, parent_digest=f"t_{prune}_none" if quantize == "int4" else "t_none_none", role="parent")])  # fmt: skip
        common = {"artifact_digest": artifact, "base_digest": "t_none_none"}
        store.append("measurement", [
            fact_row("size_bytes", SIZE[key], unit="B", suite="bytes", protocol_digest="bytes", **common),
            fact_row("bits_per_weight", 4.5 if quantize == "int4" else 16.0, unit="bit", suite="bytes", protocol_digest="bytes", **common),
            fact_row("kv_bytes_per_token", 64, unit="B/token", suite="bytes", protocol_digest="bytes", **common),
        ])  # fmt: skip
        if draft == "ngram":
            store.append("lineage", [LineageRow(artifact_digest=artifact, parent_digest=target, role="parent")])
            store.append("measurement", [
                fact_row("acceptance_rate", 0.5, unit="1", suite="acceptance", protocol_digest="acceptance", **common),
                fact_row("tokens_per_round", 3.0, unit="token", suite="acceptance", protocol_digest="acceptance", **common),
                fact_row("acceptance_when_reached", 0.75, unit="1", suite="acceptance", protocol_digest="acceptance", **common),
                fact_row("acceptance_minus_expected", -0.02, unit="1", standard_error=0.01, suite="acceptance", protocol_digest="acceptance", **common),
            ])  # fmt: skip
        if variant == "none__none__ngram":
            made_of = {"measured_speedup": 1.5, "predicted_speedup": 2.0, "draft_cost_ratio": 0.125}
            timed = {**common, "unit": "1", "suite": "speculation", "protocol_digest": "speculation", "device_digest": "cpu0", "run": "r2"}
            store.append("measurement", [fact_row(name, value, **timed) for name, value in made_of.items()])
        for day in (1, 2):
            speed = {**common, "unit": "token/s", "suite": "speed", "protocol_digest": "speed", "device_digest": "cpu0", "run": f"r{day}", "measured_at": NOON + timedelta(days=day), "threads": 2, "n": 3, "standard_error": 0.1}  # fmt: skip
            slower = 0.5 if day == 2 and variant == "none__int4__none" else 1.0
            rows = [
                fact_row("decode_tok_s", DECODE[key] * (1.5 if draft == "ngram" else 1.0) * slower, **speed),
                fact_row("prefill_tok_s", 100.0, **speed),
            ]
            rows += [fact_row("decode_no_draft_tok_s", DECODE[key], **speed)] if draft == "ngram" else []
            store.append("measurement", rows, name=f"speed_{variant}_r{day}")
    return store.root
