"""Tests of differences beside scipy, values worked by hand, laws, and null experiments in which there is nothing to find."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from assay.ops.evaluate.statistics import (
    bootstrap_mean,
    clustered_mean,
    detectable_mean,
    detectable_share,
    holm,
    mcnemar_exact,
    sign_flip_test,
    wilson,
)

RUNS = 2000
numbers = st.lists(st.floats(-100, 100), min_size=2, max_size=30)


@pytest.mark.parametrize(("b", "c", "p"), [(0, 0, 1), (1, 1, 1), (5, 0, 2 / 2**5), (0, 6, 2 / 2**6), (1, 8, 20 / 2**9), (10, 10, 1)])
def test_mcnemar_worked_by_hand(b, c, p):
    """2 · (C(9, 0) + C(9, 1)) / 2⁹ for one against eight."""
    assert mcnemar_exact(b, c) == pytest.approx(p)


@given(b=st.integers(0, 300), c=st.integers(0, 300))
def test_mcnemar_asks_for_no_side_and_errs_no_more_than_stated(b, c):
    assert mcnemar_exact(b, c) == mcnemar_exact(c, b) and 0 < mcnemar_exact(b, c) <= 1
    if b + c:  # of all outcomes of as many items, those as unlikely have together just this probability
        counts = np.arange(b + c + 1)
        as_far = abs(counts - (b + c) / 2) >= abs(b - c) / 2
        assert mcnemar_exact(b, c) == pytest.approx(stats.binom.pmf(counts[as_far], b + c, 0.5).sum())


@pytest.mark.parametrize(("b", "c"), [(-1, 2), (0.5, 2)])
def test_a_share_is_no_count(b, c):
    with pytest.raises(ValueError, match="no count"):
        mcnemar_exact(b, c)


def test_wilson_worked_by_hand_and_beside_scipy():
    """One of one: z² / (1 + z²) from below with z = 1.96, so 0.2065 to 1."""
    assert wilson(1, 1) == (1, pytest.approx(1 / (1 + stats.norm.ppf(0.975) ** 2)), 1)
    for right, n in ((0, 10), (5, 10), (3, 7), (999, 1000)):
        for level in (0.9, 0.95):
            want = stats.binomtest(right, n).proportion_ci(level, method="wilson")
            assert wilson(right, n, level=level) == (right / n, pytest.approx(want.low, abs=1e-12), pytest.approx(want.high, abs=1e-12))
    with pytest.raises(ValueError, match="5 of 4"):
        wilson(5, 4)


@given(right=st.integers(0, 50), more=st.integers(0, 50))
def test_wilson_holds_its_share_and_mirrors_the_other(right, more):
    n = right + more + 1
    value, low, high = wilson(right, n)
    assert 0 <= low <= value <= high <= 1 and high - low > 0
    assert wilson(n - right, n)[1:] == (pytest.approx(1 - high), pytest.approx(1 - low))


def test_holm_worked_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, and none below the one before."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1, 1]
    with pytest.raises(ValueError, match="from 0 to 1"):
        holm([0.5, math.nan])


@given(p=st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_lies_between_no_correction_and_bonferronis(p):
    adjusted = holm(p)
    assert all(one <= two <= min(1, one * len(p)) + 1e-12 for one, two in zip(p, adjusted, strict=True))
    assert np.argsort(adjusted, kind="stable").tolist() == sorted(range(len(p)), key=lambda at: (adjusted[at], at))
    order = np.argsort(p, kind="stable")
    assert (np.diff(np.array(adjusted)[order]) >= 0).all()


def test_the_error_of_a_clustered_mean_worked_by_hand():
    """Two problems with two samples each: means 0.5 and 0, mean 0.25; residual sums ±0.5, so √(0.5 / 16 · 2) = 0.25."""
    assert clustered_mean([1, 0, 0, 0], ["a", "a", "b", "b"]) == (0.25, pytest.approx(0.25), 4, 2)
    assert clustered_mean([1.0, 3.0], [0, 0]).clusters == 1 and math.isnan(clustered_mean([1.0, 3.0], [0, 0]).standard_error)


@given(values=numbers, copies=st.integers(2, 4))
def test_copies_of_a_value_in_its_cluster_add_no_certainty(values, copies):
    once, often = clustered_mean(values), clustered_mean(np.repeat(values, copies), np.repeat(np.arange(len(values)), copies).tolist())
    assert once.standard_error == pytest.approx(stats.sem(values), abs=1e-9)
    assert (often.value, often.standard_error) == (pytest.approx(once.value, abs=1e-9), pytest.approx(once.standard_error, abs=1e-9))


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_the_bootstrap_is_scipys(method):
    """20,000 resamples each with other random numbers: bounds within 2 % of the width. Ours at 95 % is theirs at the level that t gives for 40 values."""
    values = np.random.default_rng(3).exponential(1, 40)
    mine = bootstrap_mean(values, method=method, resamples=20_000)
    level = 1 - 2 * stats.norm.sf(stats.t.ppf(0.975, 39) * (40 / 39) ** 0.5)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, confidence_level=level, method="BCa" if method == "bca" else method, rng=4
    )
    want = theirs.confidence_interval
    near = 0.02 * (want.high - want.low)
    assert mine == (pytest.approx(values.mean()), pytest.approx(want.low, abs=near), pytest.approx(want.high, abs=near))


def test_a_bootstrap_draws_the_samples_of_a_problem_together():
    """Fifty problems with eight samples that agree: the interval is that of fifty values, √8 times as wide as that of four hundred."""
    values = np.random.default_rng(5).normal(0, 1, 50)
    eight, problem = np.repeat(values, 8), np.repeat(np.arange(50), 8).tolist()
    width = {name: interval.high - interval.low for name, interval in {
        "whole": bootstrap_mean(eight, clusters=problem), "apart": bootstrap_mean(eight), "once": bootstrap_mean(values),
    }.items()}  # fmt: skip
    assert width["whole"] == pytest.approx(width["once"]) and width["whole"] / width["apart"] == pytest.approx(8**0.5, rel=0.1)


@given(values=numbers, seed=st.integers(0, 99), method=st.sampled_from(["percentile", "bca"]))
@settings(max_examples=20, deadline=None)
def test_a_bootstrap_stays_within_its_values_and_scales_with_them(values, seed, method):
    ask = {"method": method, "seed": seed, "resamples": 200}
    value, low, high = bootstrap_mean(values, **ask)
    assert low <= high and min(values) - 1e-9 <= low and high <= max(values) + 1e-9
    assert bootstrap_mean(values, **ask) == (value, low, high)
    if np.ptp(values) > 1e-3:
        assert bootstrap_mean(2.0 * np.array(values), **ask) == pytest.approx((2 * value, 2 * low, 2 * high))


def test_values_without_a_spread_have_an_interval_without_a_width():
    assert bootstrap_mean([0.25, 0.25, 0.25]) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(("values", "more", "said"), [
    ([1.0], {}, "at least 2"), ([1.0, math.nan], {}, "not finite"), ([1.0, 2.0], {"clusters": ["a"]}, "one for each"),
    ([1.0, 2.0], {"clusters": ["a", "a"]}, "at least 2"), ([1.0, 2.0], {"level": 95}, "such as 0.95"), ([[1.0, 2.0]], {}, "shape"),
])  # fmt: skip
def test_a_bootstrap_refuses_what_it_cannot_use(values, more, said):
    with pytest.raises(ValueError, match=said):
        bootstrap_mean(values, **more)


def test_random_signs_worked_by_hand():
    """Of the 16 signs of 1, 2, 3, 4 only all plus and all minus lie as far out: 2 / 16."""
    assert sign_flip_test([1.0, 2.0, 3.0, 4.0]) == pytest.approx(2 / 16)
    assert sign_flip_test([1.0, -1.0]) == 1


@pytest.mark.parametrize("n", [5, 20, 200])
def test_a_detectable_mean_is_near_the_exact_power(n):
    """By the noncentral t: the power at the stated difference is 80 %, within two points even for five pairs."""
    shift = detectable_mean(2.0, n) / (2.0 / n**0.5)
    far = stats.t.ppf(0.975, n - 1)
    assert stats.nct.sf(far, n - 1, shift) + stats.nct.cdf(-far, n - 1, shift) == pytest.approx(0.8, abs=0.02)


def test_a_detectable_share_worked_by_hand():
    """Half of 100 items discordant: d solves 100 d² = (1.96 √0.5 + 0.8416 √(0.5 − d²))². No discordance: 7.849 / n; seven items: none."""
    found = detectable_share(0.5, 100)
    assert found is not None and 100 * found**2 == pytest.approx((1.959964 * 0.5**0.5 + 0.841621 * (0.5 - found**2) ** 0.5) ** 2, rel=1e-5)
    assert detectable_share(0, 1000) == pytest.approx(7.849e-3, abs=1e-5) and detectable_share(1.0, 7) is None


@given(n=st.integers(10, 10_000), one=st.floats(0, 1), other=st.floats(0, 1))
def test_more_items_find_less_and_more_discordance_hides_more(n, one, other):
    small, large = sorted((one, other))
    found = [detectable_share(small, 4 * n), detectable_share(small, n), detectable_share(large, n)]
    assert all(each is not None for each in found) and found == sorted(found)  # type: ignore[type-var]


def test_what_cannot_be_detected_with_is_refused():
    for wrong in (
        lambda: detectable_mean(-1, 10),
        lambda: detectable_mean(1, 1),
        lambda: detectable_share(3, 10),
        lambda: detectable_mean(1, 9, power=80),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()


def test_mcnemar_errs_in_no_more_than_five_percent_of_null_experiments():
    """Exact and so conservative: of 2,000, at most 5 % and one point."""
    counts = np.random.default_rng(0).multinomial(200, [0.15, 0.15, 0.7], RUNS)
    kinds, often = np.unique(counts[:, :2], axis=0, return_counts=True)
    found = np.array([mcnemar_exact(int(b), int(c)) < 0.05 for b, c in kinds])
    assert 0.02 <= often[found].sum() / RUNS <= 0.06


@pytest.mark.parametrize(("method", "runs", "points"), [("percentile", 2 * RUNS, 0.01), ("bca", RUNS, 0.02)])
def test_a_paired_bootstrap_errs_in_five_percent_of_null_experiments(method, runs, points):
    """Pairs of models of one score on 50 questions, of skewed values that go together: 0 lies outside the interval in 5 % ± 1 point, by BCa ± 2.

    Twice 2,000 where one point counts, since of 2,000 the share itself is known to half a point only.
    """
    generator = np.random.default_rng(0)
    shared = generator.exponential(1, (runs, 50))
    one, other = (shared + generator.exponential(0.5, (runs, 50)) for _ in range(2))
    intervals = [bootstrap_mean(row, method=method, resamples=500, seed=at) for at, row in enumerate(one - other)]
    assert np.mean([not low <= 0 <= high for _, low, high in intervals]) == pytest.approx(0.05, abs=points)
