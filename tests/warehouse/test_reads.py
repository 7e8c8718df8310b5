"""Each read is the view of its name for one experiment, in an order that a report can print."""

import shutil
from datetime import UTC, datetime

import polars as pl
import pytest

from assay.schemas.facts import VariantRow
from assay.warehouse import reads
from assay.warehouse.database import connect
from assay.warehouse.facts import FactStore


@pytest.fixture(scope="module")
def warehouse(quickstart_facts, tmp_path_factory, variants):
    facts = FactStore(shutil.copytree(quickstart_facts, tmp_path_factory.mktemp("reads") / "facts"))
    facts.append("variant", variants)
    with connect(facts.root) as connection:
        yield connection


@pytest.fixture(scope="module")
def variants():
    common = {"base": "tiny", "artifact_digest": "a", "target_digest": "a", "checkpoint_digest": "a", "spec_json": "[1]"}
    now = datetime.now(UTC)
    return [
        VariantRow(experiment=name, variant=variant, recorded_at=now, **common) for name, variant in (("other", "lonely"), ("run", "v"))
    ]


def test_experiments_by_name(warehouse):
    assert reads.experiments(warehouse) == ["other", "quickstart", "run"]


def test_the_table_of_an_experiment_in_declared_order(warehouse):
    table = reads.experiment_table(warehouse, experiment="quickstart")
    assert table.select("prune", "quantize", "draft").rows()[:4] == [
        ("none", "none", "none"), ("none", "none", "ngram"), ("none", "int4", "none"), ("none", "int4", "ngram"),
    ]  # fmt: skip
    assert table.schema["kl_mean_nats"] == pl.Float64 and table.schema["size_bytes"] == pl.Int64


def test_an_experiment_called_as_a_table_has_its_own_all_the_same(warehouse):
    assert reads.experiment_table(warehouse, "run")["variant"].to_list() == ["v"]


def test_an_unknown_experiment_is_named_beside_those_there_are(warehouse):
    with pytest.raises(KeyError, match="no experiment 'quikstart'; it has other, quickstart, run"):
        reads.experiment_table(warehouse, "quikstart")


@pytest.mark.parametrize(("read", "rows"), [
    (reads.scorecard, 8), (reads.scorecard_protocol, 5), (reads.facts, 103), (reads.pareto, 6), (reads.interaction, 4), (reads.verdicts, 8),
])  # fmt: skip
def test_a_read_is_of_one_experiment(warehouse, read, rows):
    found = read(warehouse, experiment="quickstart")
    assert found.height == rows and set(found["experiment"]) == {"quickstart"}
    assert set(read(warehouse, experiment="nowhere").columns) == set(found.columns)


def test_the_worst_comes_first(warehouse):
    assert reads.verdicts(warehouse, "quickstart")["verdict"].to_list() == ["breached"] * 2 + ["holds"] * 6
    assert reads.interaction(warehouse, "quickstart")["kl_excess_nats"].to_list() == [0.1875, 0.1875, 0.0, 0.0]
    assert reads.pareto(warehouse, "quickstart")["size_bytes"].to_list() == [270, 270, 300, 300, 1000, 1000]
    assert reads.regression(warehouse).select("variant", "metric", "flag").rows() == [("none__int4__none", "decode_tok_s", "worse")]
    assert reads.regression(warehouse, "other").height == 0
    assert reads.regression(warehouse, "quickstart", all=True).height == 20


def test_slices_leave_the_whole_out(warehouse):
    found = reads.by_slice(warehouse, "quickstart", "kl_mean_nats")
    assert found.height == 16 and set(found["slice"]) == {"digit", "other"}
    assert found.row(4)[:5] == ("none__int4__none", "kl_mean_nats", "token_class", "digit", 0.125)


def test_versus_base_compares_all_but_the_base(warehouse):
    assert "none__none__none" not in set(reads.versus_base(warehouse, "quickstart")["variant"])


def test_devices_are_those_of_timings(warehouse):
    assert reads.devices(warehouse).select("kind", "name", "cores").rows() == [("cpu", "Some CPU", 2)]
