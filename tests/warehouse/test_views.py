"""What the views answer, beside answers worked by hand. The fixture ``quickstart`` has eight variants: prune × quantize × draft."""

import math
from datetime import timedelta

import pytest
from duckdb import DuckDBPyConnection

from assay.schemas.facts import BudgetRow, ExperimentRow, ProtocolRow, VariantAxisRow
from assay.warehouse.database import connect

HOUR = timedelta(hours=1)


@pytest.fixture
def ask(store):
    """Answers from the facts as they are at each call; facts that have not changed are not read again."""
    read: dict[tuple, DuckDBPyConnection] = {}

    def answer(query: str) -> list[tuple]:
        state = tuple((path, path.stat().st_mtime_ns) for path in sorted(store.root.rglob("*.parquet")))
        if state not in read:
            read[state] = connect(store.root)
        return read[state].sql(query).fetchall()

    yield answer
    for connection in read.values():
        connection.close()


@pytest.fixture
def two(store, make_variant):
    """A base and one variant of an experiment ``e``, without facts."""
    store.append("variant", [make_variant("base", steps=0, experiment="e", artifact_digest="base"), make_variant("int4", experiment="e")])
    return store


def test_a_draft_has_the_divergence_of_its_target_and_its_own_bytes_and_speed(quickstart, ask):
    rows = ask(
        "SELECT variant, kl_mean_nats, size_bytes, decode_tok_s, decode_no_draft_tok_s, acceptance_rate FROM scorecard WHERE variant LIKE 'none__int4__%'"
    )
    assert sorted(rows) == [("none__int4__ngram", 0.0625, 300, 37.5, 25.0, 0.5), ("none__int4__none", 0.0625, 300, 12.5, None, None)]


def test_the_table_of_an_experiment_has_its_axes_as_columns_in_declared_order(quickstart, ask):
    rows = ask("SELECT prune, quantize, draft, kl_mean_nats, decode_tok_s FROM quickstart")
    assert rows[:3] == [("none", "none", "none", 0.0, 20.0), ("none", "none", "ngram", 0.0, 30.0), ("none", "int4", "none", 0.0625, 12.5)]
    assert len(rows) == 8
    assert [name for name, *_ in ask("DESCRIBE quickstart")][:5] == ["variant", "prune", "quantize", "draft", "base"]


def test_an_axis_called_as_a_column_of_the_scorecard_is_told_apart(two, ask):
    two.append("variant_axis", [VariantAxisRow(experiment="e", variant="int4", axis=axis, option=axis) for axis in ("variant", "device", "axis_device", "z")])  # fmt: skip
    assert ask("SELECT axis_axis_device, axis_device, axis_variant, z FROM e WHERE variant = 'int4'") == [
        ("axis_device", "device", "variant", "z")
    ]


def test_a_declared_experiment_has_a_table_before_anything_is_measured(store, ask, noon):
    store.append(
        "experiment", [ExperimentRow(experiment="new", question="?", axes=["prune"], variants=["none"], spec_json="{}", declared_at=noon)]
    )
    assert ask("SELECT prune, kl_mean_nats FROM new") == []


def test_a_variant_that_is_no_longer_declared_is_in_no_view(quickstart, ask, noon):
    kept = ["none__none__none", "none__int4__none"]
    quickstart.append("experiment", [ExperimentRow(experiment="quickstart", question="?", axes=["prune", "quantize", "draft"], variants=kept, spec_json="{}", declared_at=noon)])  # fmt: skip
    for view in ("current_variant", "scorecard", "quickstart", "fact", "verdict", "regression"):
        assert {name for (name,) in ask(f"SELECT variant FROM {view}")} <= set(kept), view
    assert len(ask("FROM variant")) == 8


def test_facts_of_a_protocol_that_is_not_declared_are_in_no_view(quickstart, ask, noon):
    """Other windows of text, then the old ones again."""
    told = {"experiment": "quickstart", "question": "?", "axes": ["prune", "quantize", "draft"], "variants": [name for (name,) in ask("SELECT variant FROM variant")], "spec_json": "{}"}  # fmt: skip
    known = ("by_slice", "fact", "headline", "variant_item", "paired", "regression")
    shown = {view: len(ask(f"FROM {view} WHERE suite = 'divergence'")) for view in known}
    bytes_shown = len(ask("FROM fact WHERE suite = 'bytes'"))
    assert all(shown[view] for view in known if view != "regression") and ask("FROM regression")
    quickstart.append("protocol", [ProtocolRow(protocol_digest="longer", name="divergence", suite="divergence", spec_json="{}")])
    quickstart.append("experiment", [ExperimentRow(**told, protocols=["longer", "bytes"], declared_at=noon + HOUR)])
    assert [len(ask(f"FROM {view} WHERE suite = 'divergence'")) for view in known] == [0] * len(known)
    assert len(ask("FROM fact WHERE suite = 'bytes'")) == bytes_shown > 0
    assert ask("SELECT DISTINCT kl_mean_nats FROM scorecard") == [(None,)]
    assert ask("FROM regression") == []  # it had timings alone
    quickstart.append("experiment", [ExperimentRow(**told, protocols=["divergence"], declared_at=noon + 2 * HOUR)])
    assert {view: len(ask(f"FROM {view} WHERE suite = 'divergence'")) for view in known} == shown


def test_only_the_unsplit_number_is_a_fact_and_the_parts_are_in_by_slice(quickstart, ask):
    where = "WHERE variant = 'none__int4__none' AND metric = 'kl_mean_nats'"
    assert ask(f"SELECT value FROM fact {where}") == [(0.0625,)]
    assert sorted(ask(f"SELECT slice, value FROM by_slice {where}")) == [("all", 0.0625), ("digit", 0.125), ("other", 0.03125)]


def test_a_timing_is_that_of_the_latest_run(quickstart, ask):
    assert ask("SELECT value, run FROM fact WHERE variant = 'none__int4__none' AND metric = 'decode_tok_s'") == [(12.5, "r2")]


def test_the_same_checkpoint_against_another_base_is_another_fact(two, make_variant, make_fact, ask):
    """An experiment that starts from int4 compares it with itself; that zero must not become its divergence from the first base."""
    two.append("variant", [make_variant("base", steps=0, experiment="from_int4", artifact_digest="int4")])
    two.append("measurement", [make_fact(value=0.5, artifact_digest="int4", base_digest="base")])
    two.append("measurement", [make_fact(value=0.0, artifact_digest="int4", base_digest="int4")])
    assert sorted(ask("SELECT experiment, variant, kl_mean_nats FROM scorecard")) == [
        ("e", "base", None),
        ("e", "int4", 0.5),
        ("from_int4", "base", 0.0),
    ]


def test_all_variants_of_a_scorecard_are_measured_alike(two, make_fact, ask, noon):
    """One protocol for all: what measured the most variants, of equals the first by name; so too the device of timings."""
    two.append("protocol", [ProtocolRow(protocol_digest=digest, name=name, suite="divergence", spec_json="{}") for digest, name in (("p1", "zebra"), ("p2", "ant"), ("p3", "aaa"))])  # fmt: skip
    both = [make_fact(value=value, artifact_digest=artifact, protocol_digest=protocol) for artifact in ("base", "int4") for protocol, value in (("p1", 1.0), ("p2", 2.0))]  # fmt: skip
    two.append("measurement", [*both, make_fact(value=3.0, artifact_digest="int4", protocol_digest="p3")])
    assert ask("SELECT DISTINCT kl_mean_nats, divergence_protocol FROM scorecard") == [(2.0, "ant")]
    speed = {"metric": "decode_tok_s", "suite": "speed", "protocol_digest": "s"}
    two.append(
        "measurement", [make_fact(value=10.0, artifact_digest=artifact, device_digest="d1", **speed) for artifact in ("base", "int4")]
    )
    two.append("measurement", [make_fact(value=99.0, artifact_digest="int4", device_digest="d2", measured_at=noon + HOUR, **speed)])
    assert ask("SELECT DISTINCT decode_tok_s FROM scorecard") == [(10.0,)]
    two.append("measurement", [make_fact(value=98.0, artifact_digest="base", device_digest="d2", measured_at=noon + HOUR, **speed)])
    assert sorted(ask("SELECT decode_tok_s FROM scorecard")) == [(98.0,), (99.0,)]  # the same number of variants: the latest
    assert len(ask("FROM fact WHERE metric = 'decode_tok_s'")) == 4


def test_of_several_seeds_the_smallest_stands_for_the_variant(two, make_fact, ask):
    two.append("measurement", [make_fact(value=value, artifact_digest="int4", seed=seed) for seed, value in ((3, 0.1), (1, 0.2), (2, 0.3))])
    assert ask("SELECT kl_mean_nats FROM scorecard WHERE variant = 'int4'") == [(0.2,)]


def test_a_number_that_is_not_finite_tops_no_table(two, make_variant, make_fact, ask):
    """DuckDB sorts NaN above all and takes it for the maximum; arg_max and a bound would return the broken variant."""
    for at, value in enumerate((10.0, math.nan, math.inf, None)):
        two.append("variant", [make_variant(f"v{at}", experiment="e")])
        status = {"status": "failed"} if value is None else {}
        two.append(
            "measurement", [make_fact(metric, value, artifact_digest=f"v{at}", **status) for metric in ("kl_mean_nats", "perplexity")]
        )
        two.append("measurement", [make_fact("size_bytes", float(at), artifact_digest=f"v{at}", suite="bytes", protocol_digest="b")])
    assert ask("SELECT max(perplexity), min(perplexity), avg(perplexity), arg_max(variant, perplexity) FROM scorecard") == [
        (10.0, 10.0, 10.0, "v0")
    ]
    assert ask("SELECT variant FROM pareto") == [("v0",)]
    assert sorted(ask("SELECT variant, divergence_status FROM scorecard WHERE variant LIKE 'v%'")) == [("v0", "ok"), ("v1", "not_finite"), ("v2", "not_finite"), ("v3", "failed")]  # fmt: skip


def test_the_front_is_what_no_sibling_beats_on_both(quickstart, ask):
    front = ask("SELECT variant, size_bytes, kl_mean_nats FROM pareto WHERE variant LIKE '%__none' ORDER BY size_bytes")
    assert front == [
        ("depth4__int4__none", 270, 0.5),
        ("none__int4__none", 300, 0.0625),
        ("none__none__none", 1000, 0.0),
    ]  # depth4 alone: 900, 0.25
    assert len(ask("FROM pareto")) == 6  # a draft changes neither: equals are all on it


def test_experiments_do_not_beat_each_other(quickstart, make_variant, make_fact, ask):
    quickstart.append("variant", [make_variant("tiny", experiment="other")])
    quickstart.append("measurement", [
        make_fact("kl_mean_nats", 0.0, artifact_digest="tiny"), make_fact("size_bytes", 1.0, artifact_digest="tiny", suite="bytes", protocol_digest="bytes"),
    ])  # fmt: skip
    assert len(ask("FROM pareto WHERE experiment = 'quickstart'")) == 6 and ask(
        "SELECT variant FROM pareto WHERE experiment = 'other'"
    ) == [("tiny",)]


def test_each_metric_beside_the_bases(quickstart, ask):
    rows = ask("SELECT metric, value, base_value, difference, ratio FROM versus_base WHERE variant = 'none__int4__none' ORDER BY metric")
    assert ("size_bytes", 300.0, 1000.0, -700.0, 0.3) in rows and ("decode_tok_s", 12.5, 20.0, -7.5, 0.625) in rows
    assert ("kl_mean_nats", 0.0625, 0.0, 0.0625, None) in rows  # no ratio to zero
    assert ask("SELECT count(*) FROM versus_base WHERE variant = 'none__none__none'") == [(0,)]


def test_the_base_is_the_variant_without_steps_preferably_by_that_name(store, make_variant, ask):
    store.append(
        "variant", [make_variant(name, steps=steps, experiment="e") for name, steps in (("zero", 0), ("base", 0), ("also", 0), ("int4", 1))]
    )
    assert ask("SELECT variant FROM base_variant") == [("base",)]
    store.append("variant", [make_variant("x", experiment="f", spec_json="not json"), make_variant("y", experiment="f", spec_json="{}")])
    assert ask("SELECT count(*) FROM base_variant WHERE experiment = 'f'") == [(0,)]


def test_a_combination_beside_the_sum_of_its_parts(quickstart, ask):
    """0.5 − (0.25 + 0.0625) = 0.1875 nats; √4 · 0.01 of error … of three terms √3 · 0.01; 27/20 beside 24/20 · 12.5/20."""
    ((parts, kl, total, excess, error, speed, speed_parts, speed_excess, missing),) = ask("""
        SELECT parts, kl_mean_nats, kl_sum_of_parts_nats, kl_excess_nats, kl_excess_standard_error_nats, log_speedup, log_speedup_of_parts,
               log_speedup_excess, parts_missing FROM interaction WHERE variant = 'depth4__int4__none'""")
    assert (parts, kl, total, excess, missing) == ("prune=depth4 + quantize=int4", 0.5, 0.3125, 0.1875, 0)
    assert error == pytest.approx(math.sqrt(3) * 0.01)
    assert (speed, speed_parts) == (pytest.approx(math.log(27 / 20)), pytest.approx(math.log(24 / 20) + math.log(12.5 / 20)))
    assert speed_excess == pytest.approx(speed - speed_parts)
    assert len(ask("FROM interaction")) == 4  # what leaves the base on two axes or three
    assert ask("SELECT log_speedup_excess FROM interaction WHERE variant = 'none__int4__ngram'")[0][0] == pytest.approx(
        math.log(37.5 / 20 / (1.5 * 12.5 / 20))
    )


def test_without_one_of_its_parts_a_combination_has_no_sum(quickstart, ask, make_fact, noon):
    quickstart.append("measurement", [make_fact(
        value=None, status="failed", artifact_digest="t_none_int4", base_digest="t_none_none", protocol_digest="divergence", measured_at=noon + HOUR,
    )])  # fmt: skip
    assert ask("SELECT kl_mean_nats, kl_sum_of_parts_nats, kl_excess_nats FROM interaction WHERE variant = 'depth4__int4__none'") == [
        (0.5, None, None)
    ]


def test_a_noisy_timing_is_shown_not_ranked_and_marks_what_is_made_of_it(quickstart, ask, make_fact, noon):
    quickstart.append("measurement", [make_fact(
        "decode_tok_s", 30.0, unit="token/s", suite="speed", protocol_digest="speed", artifact_digest="t_depth4_none", base_digest="t_none_none",
        device_digest="cpu0", status="noisy", run="r3", measured_at=noon + timedelta(days=3),
    )])  # fmt: skip
    quickstart.append("budget", [BudgetRow(experiment="quickstart", variant="depth4__none__none", metric="decode_tok_s", at_least=10.0, recorded_at=noon)])  # fmt: skip
    where = "WHERE variant = 'depth4__none__none'"
    assert ask(f"SELECT decode_tok_s, timing_status FROM scorecard {where}") == [(30.0, "noisy")]
    assert ask(f"SELECT value, verdict, status FROM verdict {where}") == [(30.0, "not_measured", "noisy")]
    assert ask(f"SELECT value, previous_value, flag FROM regression {where} AND metric = 'decode_tok_s'") == [(30.0, 24.0, "noisy")]
    assert ask("SELECT timing_status FROM interaction WHERE variant = 'depth4__int4__none'") == [("noisy",)]
    assert ask("SELECT timing_status FROM interaction WHERE variant = 'none__int4__ngram'") == [("ok",)]


def test_what_became_slower_beyond_noise_is_flagged_and_nothing_else(quickstart, ask):
    moved = ask("SELECT variant, metric, value, previous_value, bound, flag, run, previous_run FROM regression WHERE flag <> 'same'")
    assert moved == [("none__int4__none", "decode_tok_s", 12.5, 25.0, 1.25, "worse", "r2", "r1")]
    assert {flag for (flag,) in ask("SELECT flag FROM regression WHERE variant <> 'none__int4__none'")} == {"same"}


@pytest.mark.parametrize(("value", "error", "flag"), [
    (104.9, 0.1, "same"), (95.1, 0.1, "same"), (105.1, 0.1, "better"), (94.9, 0.1, "worse"), (106.0, 2.0, "same"), (91.0, 2.0, "worse"),
])  # fmt: skip
def test_a_timing_moves_beyond_five_percent_or_three_errors_of_the_difference(two, make_fact, ask, noon, value, error, flag):
    """Errors 2 and 2: three of the difference are 3 · √8 = 8.49."""
    speed = {"metric": "decode_tok_s", "suite": "speed", "artifact_digest": "int4", "device_digest": "d", "standard_error": error}
    two.append(
        "measurement", [make_fact(value=100.0, run="r1", **speed), make_fact(value=value, run="r2", measured_at=noon + HOUR, **speed)]
    )
    assert ask("SELECT flag FROM regression") == [(flag,)]


@pytest.mark.parametrize(("value", "error", "flag"), [
    (0.5, 0.01, "changed"), (0.52, 0.01, "changed"), (0.53, 0.01, "worse"), (0.47, 0.01, "better"), (0.9, None, "changed"), (None, None, "lost"),
])  # fmt: skip
def test_another_artifact_moves_a_divergence_beyond_two_errors_of_the_difference(
    two, make_variant, make_fact, ask, noon, value, error, flag
):
    """Errors 0.01 and 0.01: two of the difference are 2 · √0.0002 = 0.0283. Without an error nothing can be said but that it changed."""
    two.append("measurement", [make_fact(value=0.5, standard_error=0.01, artifact_digest="int4")])
    assert ask("FROM regression") == []
    two.append("variant", [make_variant("int4", experiment="e", artifact_digest="int4_again", recorded_at=noon + HOUR)])
    assert ask("FROM regression") == []  # not measured yet
    status = {"status": "not_finite"} if value is None else {}
    two.append(
        "measurement", [make_fact(value=value, standard_error=error, artifact_digest="int4_again", measured_at=noon + HOUR, **status)]
    )
    assert ask("SELECT value, previous_value, digest_changed, flag FROM regression") == [(value, 0.5, True, flag)]
    two.append("variant", [make_variant("int4", experiment="e", artifact_digest="int4", recorded_at=noon + 2 * HOUR)])  # put back
    ((now, before),) = ask("SELECT value, previous_value FROM regression") or [(0.5, None)]
    assert (now, before) == (0.5, value)


def test_bytes_are_exact(two, make_variant, make_fact, ask, noon):
    size = {"metric": "size_bytes", "suite": "bytes"}
    two.append("variant", [make_variant("int4", experiment="e", artifact_digest="next", recorded_at=noon + HOUR)])
    two.append(
        "measurement", [make_fact(value=1000.0, artifact_digest="int4", **size), make_fact(value=1001.0, artifact_digest="next", **size)]
    )
    assert ask("SELECT difference, flag FROM regression") == [(1.0, "worse")]


def test_the_last_good_run_is_compared_with_not_a_failed_or_noisy_one(two, make_fact, ask, noon):
    speed = {"metric": "decode_tok_s", "suite": "speed", "artifact_digest": "int4", "device_digest": "d"}
    values = [(100.0, "ok"), (50.0, "noisy"), (None, "failed"), (80.0, "ok")]
    two.append("measurement", [make_fact(value=value, status=status, run=f"r{at}", measured_at=noon + at * HOUR, **speed) for at, (value, status) in enumerate(values)])  # fmt: skip
    assert ask("SELECT value, previous_value, previous_run, flag FROM regression") == [(80.0, 100.0, "r0", "worse")]


def test_another_device_is_no_regression(two, make_fact, ask, noon):
    speed = {"metric": "decode_tok_s", "suite": "speed", "artifact_digest": "int4"}
    two.append("measurement", [make_fact(value=100.0, device_digest="fast", **speed), make_fact(value=10.0, device_digest="slow", run="r2", measured_at=noon + HOUR, **speed)])  # fmt: skip
    assert ask("FROM regression") == []


def test_a_draft_that_changed_moves_no_divergence(store, make_variant, make_fact, ask, noon):
    store.append(
        "variant",
        [make_variant("d", experiment="e", artifact_digest=f"draft{at}", target_digest="t", recorded_at=noon + at * HOUR) for at in (0, 1)],
    )
    store.append("measurement", [make_fact(artifact_digest="t")])
    assert ask("FROM regression") == [] and ask("SELECT value FROM fact") == [(0.5,)]


def test_a_suite_that_failed_has_failed_in_every_metric_until_it_succeeds(two, make_fact, ask, noon):
    """A failure is one row called as its suite; a scorecard and a regression ask for metrics."""
    speed = {"suite": "speed", "protocol_digest": "s", "device_digest": "d"}
    two.append("measurement", [make_fact("decode_tok_s", 100.0, artifact_digest=artifact, **speed) for artifact in ("base", "int4")])
    two.append("measurement", [make_fact("speed", None, unit="", artifact_digest="int4", status="failed", message="out of memory", run="r2", measured_at=noon + HOUR, **speed)])  # fmt: skip
    where = "WHERE variant = 'int4'"
    assert ask(f"SELECT decode_tok_s, timing_status FROM scorecard {where}") == [(None, "failed")]
    assert ask(f"SELECT metric, value, previous_value, flag, message FROM regression {where}") == [
        ("decode_tok_s", None, 100.0, "lost", "out of memory")
    ]
    two.append("measurement", [make_fact("decode_tok_s", 101.0, artifact_digest="int4", run="r3", measured_at=noon + 2 * HOUR, **speed)])
    assert ask(f"SELECT decode_tok_s, timing_status FROM scorecard {where}") == [(101.0, "ok")]
    assert ask(f"SELECT value, previous_value, flag FROM regression {where}") == [(101.0, 100.0, "same")]
    assert ask("SELECT count(*) FROM fact WHERE metric = 'speed'") == [(0,)]


def test_a_suite_that_failed_everywhere_still_says_so(two, make_fact, ask):
    two.append("measurement", [make_fact("divergence", None, unit="", artifact_digest="int4", status="failed", message="no text")])
    assert ask("SELECT divergence_status FROM scorecard WHERE variant = 'int4'") == [("failed",)]
    assert ask("SELECT message FROM fact WHERE status = 'failed'") == [("no text",)]


def test_a_budget_holds_or_is_breached_or_was_not_measured(quickstart, ask):
    verdicts = dict(ask("SELECT variant, verdict FROM verdict WHERE variant LIKE '%__none'"))
    assert verdicts == {
        "none__none__none": "holds",
        "none__int4__none": "holds",
        "depth4__none__none": "holds",
        "depth4__int4__none": "breached",
    }


@pytest.mark.parametrize(("bounds", "verdict"), [
    ({"at_most": 0.5}, "holds"), ({"at_most": 0.4999}, "breached"), ({"at_least": 0.5}, "holds"), ({"at_least": 0.5001}, "breached"),
    ({"at_most": 1.0, "metric": "perplexity"}, "not_measured"),
])  # fmt: skip
def test_a_bound_includes_its_value(two, make_fact, ask, noon, bounds, verdict):
    two.append("measurement", [make_fact(value=0.5, artifact_digest="int4")])
    two.append("budget", [BudgetRow(**{"experiment": "e", "variant": "int4", "metric": "kl_mean_nats", "recorded_at": noon, **bounds})])
    assert ask("SELECT verdict FROM verdict") == [(verdict,)]


def test_a_budget_from_before_the_last_declaration_is_history(quickstart, ask, noon):
    variants = ["none__none__none"]
    quickstart.append("experiment", [ExperimentRow(experiment="quickstart", question="?", axes=[], variants=variants, spec_json="{}", declared_at=noon + HOUR)])  # fmt: skip
    assert ask("FROM verdict") == []


def test_every_metric_says_which_direction_is_better(quickstart, ask):
    assert ask("SELECT better FROM metric WHERE metric IN ('kl_mean_nats', 'decode_tok_s') ORDER BY metric") == [("higher",), ("lower",)]
    assert ask("SELECT count(*) FROM headline WHERE better IS NULL AND metric <> 'acceptance_minus_expected'") == [(0,)]


@pytest.mark.parametrize("order", [1, -1])
def test_no_answer_depends_on_the_order_in_which_facts_were_written(store, make_variant, make_fact, ask, order):
    rows = [make_fact(f"m{at}", at / 10, artifact_digest="int4", run=f"r{at % 3}") for at in range(20)][::order]
    for row in rows:
        store.append("measurement", [row])
    store.append("variant", [make_variant("int4")])
    assert ask("SELECT metric, value, run FROM fact ORDER BY ALL") == sorted((f"m{at}", at / 10, f"r{at % 3}") for at in range(20))


def test_two_variants_are_compared_on_the_items_that_both_have(quickstart, ask):
    rows = ask(
        "SELECT n, difference, standard_error, suite, protocol FROM paired WHERE variant = 'depth4__int4__none' AND other = 'none__int4__none'"
    )
    differences = [(0.5 - 0.0625) * part for part in (0.5, 1.0, 1.5, 1.0)]
    mean = sum(differences) / 4
    error = math.sqrt(sum((each - mean) ** 2 for each in differences) / 3 / 4)
    assert rows == [(4, pytest.approx(mean), pytest.approx(error), "divergence", "divergence")]
    ((back,),) = ask("SELECT difference FROM paired WHERE other = 'depth4__int4__none' AND variant = 'none__int4__none'")
    assert back == pytest.approx(-mean)
    # a draft has the divergence of its target, item by item
    assert ask("SELECT difference, standard_error FROM paired WHERE variant = 'none__int4__ngram' AND other = 'none__int4__none'") == [
        (0.0, 0.0)
    ]
    assert ask("SELECT count(*) FROM paired WHERE variant = other") == [(0,)]
