"""The report of an experiment that measures no divergence, or no size: all the rest of it, and a sentence where the picture would be."""

import polars as pl
import pytest

from assay.assets.report import NO_PICTURE, frontier
from assay.assets.run import instance

BARE = """
name: bare
base: {path: base, dtype: float32}
axes: {quantize: {none: []}}
measure:
"""
ARITHMETIC = "{suite: arithmetic, problems: 3, digits: [1], shots: 1, samples: 2, ks: [1, 2], temperatures: [0.7, 0], max_new_tokens: 4}"


@pytest.mark.parametrize("measure", ["bytes", ARITHMETIC])
def test_an_experiment_without_divergence_has_a_report_without_the_picture(bench, place, run_experiment, measure):
    (place / "bare.yaml").write_text(f"{BARE}  - {measure}\n")
    _, success = run_experiment(bench, "bare")
    assert success
    page = (bench.reports / "bare.html").read_text()
    assert NO_PICTURE in page
    assert ("data:image/png" in page) == (measure == ARITHMETIC)  # what is solved at each temperature
    assert ("size bytes" in page) == (measure == "bytes")
    assert ("majority_at_k" in page and "0.7/2" in page) == (measure == ARITHMETIC)
    event = instance(bench).get_latest_materialization_event(bench_key("bare"))
    assert event is not None and event.asset_materialization is not None
    assert event.asset_materialization.metadata["size_against_mean_kl"].value == NO_PICTURE


def bench_key(name):
    from dagster import AssetKey

    return AssetKey([name, "report"])


def test_one_variant_with_both_numbers_is_enough_for_a_picture():
    table = pl.DataFrame(
        {"variant": ["a", "b"], "size_bytes": [2**20, None], "kl_mean_nats": [None, 0.1]}, schema_overrides={"size_bytes": pl.Int64}
    )
    assert frontier(table) is None
    both = table.with_columns(kl_mean_nats=pl.lit(0.2))
    picture = frontier(both)
    assert picture is not None and picture.startswith(b"\x89PNG")
