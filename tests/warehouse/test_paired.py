"""The tests and intervals of the views: SQL arithmetic beside scipy, comparisons worked by hand, null experiments, and what must not be compared."""

import json
import math

import duckdb
import numpy as np
import pytest
from scipy import stats

from assay.schemas.facts import Item, ProtocolRow
from assay.schemas.metrics import METRICS
from assay.warehouse.database import HERE, connect

PAIR = "variant = 'int4' AND other = 'base'"


@pytest.fixture(scope="module")
def sql():
    """A database with nothing but the macros."""
    with duckdb.connect() as connection:
        connection.execute((HERE / "macros.sql").read_text(encoding="utf-8"))
        yield connection


@pytest.fixture
def two(store, make_variant):
    """A base and the variants int4 and int3 of an experiment ``e``."""
    store.append("variant", [make_variant("base", steps=0, experiment="e", artifact_digest="base"), *(make_variant(name, experiment="e") for name in ("int4", "int3"))])  # fmt: skip
    return store


@pytest.fixture
def measure(two, make_fact):
    """Write items of one artifact with the fact that they belong to."""

    def write(artifact, values, *, metric="accuracy", suite="choice", protocol="p", run="r1", **fact):
        rows = [Item(artifact_digest=artifact, protocol_digest=protocol, suite=suite, item=at, metric=metric, value=value, run=run) for at, value in enumerate(values)]  # fmt: skip
        two.append("item", rows)
        known = [value for value in values if value is not None]
        told = {"artifact_digest": artifact, "protocol_digest": protocol, "suite": suite, "unit": "1", "run": run, "path": "dense", **fact}
        two.append("measurement", [make_fact(metric.split("/")[0], sum(known) / len(known), **told)])

    return write


def ask(store, query):
    with connect(store.root) as connection:
        return connection.sql(query).fetchall()


@pytest.mark.parametrize("n", [0, 1, 5, 6, 7, 20, 101, 1000, 9_999, 100_000])
def test_mcnemar_is_scipys_binomial_test(sql, n):
    root = math.isqrt(n)
    for b in sorted({each for each in (0, 1, n // 2, n // 2 - 3, n // 3, n // 2 - root // 2, n // 2 - 2 * root, n) if 0 <= each <= n}):
        ((p,),) = sql.sql(f"SELECT mcnemar_exact({b}::BIGINT, {n - b}::BIGINT)").fetchall()
        assert p == pytest.approx(stats.binomtest(b, n).pvalue if n else 1, abs=1e-9)


@pytest.mark.parametrize("df", [1, 2, 3, 5, 29, 999, 1_000_000])
def test_the_tail_and_the_interval_of_t_are_scipys(sql, df):
    for t in (0, 0.01, 0.5, -1, 1.96, -2.5, 4, 10, 40):
        ((p,),) = sql.sql(f"SELECT t_two_sided({t}::DOUBLE, {df}::BIGINT)").fetchall()
        assert p == pytest.approx(2 * stats.t.sf(abs(t), df), abs=1e-9)
    ((half,),) = sql.sql(f"SELECT t_975({df}::BIGINT)").fetchall()
    assert half == pytest.approx(stats.t.ppf(0.975, df), rel=3e-5)


@pytest.mark.parametrize(("right", "n"), [(0, 10), (5, 10), (10, 10), (1, 3), (730, 1000)])
def test_the_interval_of_a_share_is_scipys_wilson(sql, right, n):
    want = stats.binomtest(right, n).proportion_ci(method="wilson")
    ((low, high),) = sql.sql(f"SELECT wilson_low({right / n}::DOUBLE, {n}), wilson_high({right / n}::DOUBLE, {n})").fetchall()
    assert (low, high) == (pytest.approx(want.low, abs=1e-9), pytest.approx(want.high, abs=1e-9))


def test_a_detectable_difference_would_be_found_in_four_of_five_samples(sql):
    """Power counted over samples that hold the difference: of means through the t-test, of shares through McNemar's."""
    generator = np.random.default_rng(0)
    n, samples = 100, 4000
    ((mean,), (share,)) = sql.sql(f"SELECT detectable_mean(2.0 / 10, {n}) UNION ALL SELECT detectable_share(0.3, {n})").fetchall()
    drawn = generator.normal(mean, 2.0, (samples, n))
    assert (stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.03)
    counts = generator.multinomial(n, [(0.3 + share) / 2, (0.3 - share) / 2, 0.7], samples)
    asymptotic = 2 * stats.norm.sf(abs(counts[:, 0] - counts[:, 1]) / np.sqrt(np.maximum(1, counts[:, 0] + counts[:, 1])))
    assert (asymptotic < 0.05).mean() == pytest.approx(0.8, abs=0.04)
    assert sql.sql("SELECT detectable_share(0.0, 7), detectable_share(0.0, 8) <= 1, detectable_share(0.0, 1000)").fetchall() == [
        (None, True, pytest.approx(7.85e-3, abs=1e-4))
    ]


def test_shares_are_compared_by_the_items_on_which_they_differ(measure, two):
    """Twelve items: eight where only int4 is right, one where only the base is. p = 2 · (1 + 9) / 2⁹; the mean is 7/12."""
    measure("int4", [1] * 8 + [0] + [1, 1, 0])
    measure("base", [0] * 8 + [1] + [1, 1, 0])
    ((n, difference, test, mine, theirs, p, finding, shown),) = ask(
        two, f"SELECT n, difference, test, only_variant, only_other, p, finding, difference_shown FROM paired WHERE {PAIR}"
    )
    assert (n, test, mine, theirs, finding) == (12, "mcnemar_exact", 8, 1, "better")
    assert difference == shown == pytest.approx(7 / 12) and p == pytest.approx(20 / 512)
    assert ask(two, "SELECT finding, difference FROM paired WHERE variant = 'base'") == [("worse", pytest.approx(-7 / 12))]


def test_means_are_compared_by_the_paired_t_test(measure, two):
    generator = np.random.default_rng(1)
    one, other = generator.normal(0.2, 1, 12), generator.normal(0, 1, 12)
    measure("int4", one.tolist(), metric="kl_mean_nats", suite="divergence", base_digest="base")
    measure("base", other.tolist(), metric="kl_mean_nats", suite="divergence", base_digest="base")
    ((test, p, low, high, finding, shown, detectable),) = ask(two, f"SELECT test, p, low, high, finding, difference_shown, detectable FROM paired WHERE {PAIR}")  # fmt: skip
    want = stats.ttest_rel(one, other)
    interval = want.confidence_interval()
    assert (test, finding, shown) == ("paired_t", "none", 0)
    assert (p, low, high) == (pytest.approx(want.pvalue), pytest.approx(interval.low, rel=1e-4), pytest.approx(interval.high, rel=1e-4))
    error = (one - other).std(ddof=1) / 12**0.5
    assert detectable == pytest.approx(error * (stats.t.ppf(0.975, 11) + stats.t.ppf(0.8, 11)), rel=1e-4)


@pytest.mark.parametrize(("values", "p", "finding"), [([0.5], None, None), ([0.5, 0.5], 0, "better"), ([0.0, 0.0], 1, "none")])
def test_without_a_spread_there_is_a_finding_only_where_there_is_a_difference(measure, two, values, p, finding):
    """One pair of items is no sample; equal differences leave nothing to chance."""
    measure("int4", [0.25 + value for value in values], metric="pass_at_1", suite="arithmetic")
    measure("base", [0.25] * len(values), metric="pass_at_1", suite="arithmetic")
    assert ask(two, f"SELECT p, finding FROM paired WHERE {PAIR}") == [(p, finding)]


def test_the_samples_of_a_problem_are_one_item_so_errors_are_clustered_by_problem(measure, two):
    """Two problems with 8 samples each: n is 2, and the spread is that between problems."""
    measure("int4", [8 / 8, 2 / 8], metric="pass_at_1/0.7", suite="arithmetic")
    measure("base", [4 / 8, 2 / 8], metric="pass_at_1/0.7", suite="arithmetic")
    assert ask(two, f"SELECT n, standard_error, better FROM paired WHERE {PAIR}") == [(2, pytest.approx(0.25), "higher")]


def test_p_values_are_held_together_by_holm(measure, two, make_variant):
    """Three variants against the base, of which two are one artifact and one hypothesis: 6 of 6 and 7 of 8 discordant items, so 2 · p₁ and p₂ at least."""
    two.append("variant", [make_variant("int4_again", experiment="e", artifact_digest="int4")])
    measure("base", [0] * 7 + [1, 0, 0])
    measure("int4", [1] * 6 + [0] + [1, 0, 0])
    measure("int3", [1] * 7 + [0, 0, 0])
    first, second = 2 / 2**6, 2 * 9 / 2**8
    rows = dict(ask(two, "SELECT variant, p_holm FROM paired WHERE other = 'base'"))
    assert rows == {
        "int4": pytest.approx(2 * first),
        "int4_again": pytest.approx(2 * first),
        "int3": pytest.approx(max(2 * first, second)),
    }


def test_a_difference_under_the_noise_floor_is_none(measure, two):
    """The base in batches of 8 and 16 moves by 0.25: a difference of 0.25 that a t-test finds is none, one of 0.5 stands."""
    specs = {"p": {"suite": "choice", "batch": 8}, "q": {"suite": "choice", "batch": 16}}
    two.append("protocol", [ProtocolRow(protocol_digest=name, name=name, suite="choice", spec_json=json.dumps(spec)) for name, spec in specs.items()])  # fmt: skip
    measure("base", [0.0, 0.125] * 4, metric="accuracy/x")
    measure("int4", [0.25, 0.375] * 4, metric="accuracy/x")
    measure("int3", [0.5, 0.625] * 4, metric="accuracy/x")
    query = "SELECT variant, noise_floor, above_noise, finding, difference_shown FROM paired WHERE other = 'base' AND protocol = 'p' ORDER BY variant"
    assert ask(two, query) == [("int3", None, None, "better", 0.5), ("int4", None, None, "better", 0.25)]
    measure("base", [0.25, 0.375] * 4, metric="accuracy/x", protocol="q")
    assert ask(two, query) == [("int3", 0.25, True, "better", 0.5), ("int4", 0.25, False, "none", 0.0)]


def test_items_of_an_earlier_run_do_not_count(measure, two, noon):
    """Runs have names without an order: what counts is the run of the latest facts, whole."""
    measure("base", [0, 0, 0])
    measure("int4", [1, 1, 1, 1], run="z")
    measure("int4", [0, 0, 1], run="a", measured_at=noon.replace(hour=13))
    assert ask(two, f"SELECT n, difference FROM paired WHERE {PAIR}") == [(3, pytest.approx(1 / 3))]


def test_a_divergence_from_another_base_is_not_paired(measure, two):
    kl = {"metric": "kl_mean_nats", "suite": "divergence"}
    measure("base", [0.0, 0.0], base_digest="base", **kl)
    measure("int4", [0.5, 0.25], run="r1", base_digest="base", **kl)
    measure("int4", [9.0, 9.0], run="r2", base_digest="other", **kl)
    assert ask(two, f"SELECT difference FROM paired WHERE {PAIR}") == [(0.375,)]


@pytest.mark.parametrize("way", ["protocol", "engine", "device"])
def test_what_was_measured_in_two_ways_is_compared_by_no_view(measure, two, noon, way):
    """Greedy against sampled, one engine against another, one machine against another: no row of any view holds both numbers."""
    here = {
        "protocol": {"protocol": "greedy"},
        "engine": {"path": "native avx512 float32, int4 weights"},
        "device": {"device_digest": "d1"},
    }[way]
    there = {"protocol": {"protocol": "sampled"}, "engine": {"path": "torch float32, int4 weights"}, "device": {"device_digest": "d2"}}[way]
    measure("int4", [1, 1, 1, 1, 1, 1], **here)
    measure("base", [0, 0, 0, 0, 0, 0], **there)
    assert ask(two, "FROM paired") == []
    assert ask(two, "FROM versus_base WHERE difference IS NOT NULL OR ratio IS NOT NULL") == []
    assert ask(two, "FROM regression") == []
    measure("base", [0, 0, 0, 0, 0, 0], run="r2", measured_at=noon.replace(hour=13), **here)
    assert len(ask(two, f"FROM paired WHERE {PAIR}")) == 1  # measured alike, they compare
    assert ask(two, "SELECT difference FROM versus_base WHERE variant = 'int4'") == [(1,)]


def test_the_items_of_the_last_run_are_of_the_machine_that_made_them(measure, two, noon):
    """d2 is greater than d1 and was asked first: neither order nor name decides, but the time."""
    measure("base", [0, 0], device_digest="d2")
    measure("base", [1, 0], run="r2", measured_at=noon.replace(hour=13), device_digest="d1", path="native avx512 float32, dense weights")
    assert ask(two, "SELECT run, device_digest, engine FROM item_run") == [("r2", "d1", "native avx512 float32")]


def test_other_weights_on_the_same_engine_compare(measure, two):
    measure("int4", [1, 1], path="native avx512 float32, int4+bfloat16 weights")
    measure("base", [0, 0], path="native avx512 float32, bfloat16 weights")
    assert ask(two, "SELECT difference FROM versus_base") == [(1,)] and len(ask(two, "FROM paired")) == 2


@pytest.mark.parametrize("change", [{"protocol_digest": "q"}, {"device_digest": "d2"}, {"threads": 8}, {"seed": 1}])
def test_a_timing_is_compared_only_with_one_taken_alike(two, make_fact, noon, change):
    common = {"suite": "speed", "protocol_digest": "p", "device_digest": "d1", "threads": 2, "unit": "token/s", "path": "native, x weights"}
    two.append("measurement", [make_fact("decode_tok_s", 10.0, artifact_digest="int4", **common)])
    two.append("measurement", [make_fact("decode_tok_s", 20.0, artifact_digest="base", **{**common, **change})])
    two.append("measurement", [make_fact("decode_tok_s", 30.0, artifact_digest="int4", run="r2", measured_at=noon.replace(hour=13), **{**common, **change})])  # fmt: skip
    # 30 and 20 were taken alike, 10 and 20 were not; of two seeds the smaller stands for a variant, and the base has it not
    found = [] if "seed" in change else [("int4", 30.0, 20.0)]
    assert ask(two, "SELECT variant, value, base_value FROM versus_base WHERE base_value IS NOT NULL") == found
    assert ask(two, "FROM regression") == []


def test_no_combination_is_summed_from_parts_that_were_measured_otherwise(quickstart, make_fact):
    """A part whose divergence is known only under another protocol is missing."""
    with connect(quickstart.root) as connection:
        before = connection.sql("SELECT variant, kl_sum_of_parts_nats, log_speedup_of_parts FROM interaction ORDER BY ALL").fetchall()
    told = {"artifact_digest": "t_none_int4", "base_digest": "t_none_none", "protocol_digest": "elsewhere", "measured_at": make_fact().measured_at.replace(month=12)}  # fmt: skip
    quickstart.append(
        "measurement", [make_fact(value=7.0, **told), make_fact("decode_tok_s", 7.0, suite="speed", device_digest="cpu1", **told)]
    )
    assert ask(quickstart, "SELECT variant, kl_sum_of_parts_nats, log_speedup_of_parts FROM interaction ORDER BY ALL") == before


def test_each_metric_is_of_one_suite_and_no_other_can_speak_for_it(two, make_fact):
    names = [metric for metrics in METRICS.values() for metric in metrics]
    assert len(names) == len(set(names))
    two.append("measurement", [make_fact("accuracy", 0.9, artifact_digest="int4", suite="arithmetic", protocol_digest="a")])
    two.append("measurement", [make_fact("accuracy", 0.1, artifact_digest="base", suite="choice", protocol_digest="c")])
    assert ask(two, "SELECT variant FROM headline") == [("base",)] and ask(two, "FROM versus_base") == []


def test_a_share_has_its_interval_whole_and_split(two, make_fact):
    """7 of 10 has Wilson's interval of 10; clustered, that of the samples that its standard error comes to: 0.21 / 0.0525 + 1 = 5."""
    share = {"artifact_digest": "int4", "suite": "choice", "unit": "1", "protocol_digest": "c", "n": 10}
    two.append("measurement", [
        make_fact("accuracy", 0.7, standard_error=(0.21 / 9) ** 0.5, **share),
        make_fact("accuracy", 0.7, standard_error=0.0525**0.5, slice_kind="task", slice="piqa", **share),
        make_fact("accuracy", 1.0, standard_error=0.0, slice_kind="task", slice="mmlu", **share),
        make_fact("option_mass", 0.5, **share),
    ])  # fmt: skip
    rows = {part: (low, high) for part, low, high in ask(two, "SELECT slice, low, high FROM accuracy")}
    for part, right, n in (("all", 7, 10), ("mmlu", 10, 10)):
        want = stats.binomtest(right, n).proportion_ci(method="wilson")
        assert rows[part] == (pytest.approx(want.low), pytest.approx(want.high))
    five = stats.norm.ppf(0.975) ** 2 / 5
    middle, half = (0.7 + five / 2) / (1 + five), math.sqrt(five * 0.21 + five**2 / 4) / (1 + five)
    assert rows["piqa"] == (pytest.approx(middle - half), pytest.approx(middle + half)) and len(rows) == 3


@pytest.mark.parametrize(("kind", "n", "at_least"), [("mean", 30, 0.04), ("share", 100, 0.0)])
def test_the_tests_find_nothing_where_there_is_nothing(sql, kind, n, at_least):
    """2,000 null experiments: the t-test errs in 5 % ± 1 point; McNemar's exact test, which is conservative, in at most 5 % + 1 point."""
    generator = np.random.default_rng(7)
    if kind == "mean":
        differences = generator.exponential(1, (2000, n)) - generator.exponential(1, (2000, n))
        cases = differences.mean(1) / (differences.std(1, ddof=1) / n**0.5)
        test = "t_two_sided(x, 29)"
    else:
        counts = generator.multinomial(n, [0.2, 0.2, 0.6], 2000)
        cases = counts[:, 0] * 1000.0 + counts[:, 1]
        test = "mcnemar_exact((x // 1000)::BIGINT, (x % 1000)::BIGINT)"
    ((share,),) = sql.sql(f"SELECT avg(({test} < 0.05)::INTEGER) FROM unnest($cases) AS t (x)", params={"cases": cases.tolist()}).fetchall()
    assert at_least <= share <= 0.06
