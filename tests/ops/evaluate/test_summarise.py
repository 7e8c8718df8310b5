"""Averages, quantiles and their standard errors."""

import math
from itertools import product

import pytest
import torch
from torch import tensor

from assay.ops.evaluate.divergence import PerToken
from assay.ops.evaluate.summarise import histogram, summarise


def tokens(kl, *, nll=None, base_nll=None, agrees=None) -> PerToken:
    kl = tensor(kl, dtype=torch.float32)
    other = torch.zeros_like(kl)
    return PerToken(
        kl, kl / 10, torch.ones_like(kl, dtype=torch.bool) if agrees is None else tensor(agrees), other if nll is None else tensor(nll),
        other if base_nll is None else tensor(base_nll), other,
    )  # fmt: skip


def by_name(summary, slice="all"):
    return {each.metric: each for each in summary.metrics if each.slice == slice}


def test_means_and_quantiles_worked_by_hand():
    found = by_name(summarise(tokens([float(x) for x in range(1, 101)]), torch.arange(100) // 10))
    assert [found[f"kl_{name}_nats"].value for name in ("mean", "p50", "p90", "p99", "max")] == [50.5, 50, 90, 99, 100]
    assert found["tv_mean"].value == pytest.approx(5.05) and found["top1_agreement"].value == 1
    assert all(each.n == 100 for each in found.values())


def test_the_standard_error_is_that_of_window_means_where_windows_are_equal():
    kl = torch.rand(6, 7, generator=torch.Generator().manual_seed(0))
    found = by_name(summarise(tokens(kl.flatten().tolist()), torch.arange(42) // 7))["kl_mean_nats"]
    assert found.standard_error == pytest.approx(float(kl.double().mean(dim=1).std()) / math.sqrt(6), rel=1e-6)


def test_tokens_of_one_window_are_not_independent():
    """Windows of ten equal tokens: the error is of three windows, not of thirty tokens."""
    found = by_name(summarise(tokens([1.0] * 10 + [2.0] * 10 + [3.0] * 10), torch.arange(30) // 10))["kl_mean_nats"]
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    by_token = tensor([1.0] * 10 + [2.0] * 10 + [3.0] * 10).std() / math.sqrt(30)
    assert found.standard_error > 3 * by_token


def test_unequal_windows_weigh_as_their_tokens():
    """Windows of 4, 4 and 2 tokens: m = 1.4; residuals 4·(1−1.4), 4·(1−1.4), 2·(3−1.4) = −1.6, −1.6, 3.2."""
    found = by_name(summarise(tokens([1.0] * 8 + [3.0] * 2), tensor([0] * 4 + [1] * 4 + [2] * 2)))["kl_mean_nats"]
    assert found.value == pytest.approx(1.4)
    assert found.standard_error == pytest.approx(math.sqrt(1.5 * (1.6**2 + 1.6**2 + 3.2**2)) / 10)


def test_one_window_has_no_standard_error_and_a_maximum_never_has_one():
    found = by_name(summarise(tokens([1.0, 2.0, 3.0]), torch.zeros(3, dtype=torch.int64)))
    assert all(each.standard_error is None for each in found.values())
    assert by_name(summarise(tokens([1.0, 2.0]), torch.arange(2)))["kl_max_nats"].standard_error is None


def test_the_error_of_a_median_agrees_with_resampling():
    """Half the distance between the ranks, against the spread of medians over fresh samples of windows."""

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(40, 1, generator=generator) + torch.randn(40, 25, generator=generator)).flatten().tolist()

    window = torch.arange(1000) // 25
    medians = [by_name(summarise(tokens(sample(seed)), window))["kl_p50_nats"] for seed in range(60)]
    spread = float(tensor([each.value for each in medians]).std())
    stated = float(tensor([each.standard_error for each in medians]).mean())
    assert 0.7 < stated / spread < 1.4


def test_perplexity_is_over_tokens_and_its_delta_is_paired():
    nll, base = [1.0] * 8 + [3.0] * 2, [0.5] * 8 + [2.5] * 2
    found = by_name(summarise(tokens([0.0] * 10, nll=nll, base_nll=base), tensor([0] * 4 + [1] * 4 + [2] * 2)))
    assert found["perplexity"].value == pytest.approx(4.0552, abs=1e-4)
    assert found["base_perplexity"].value == pytest.approx(math.exp(0.9))
    assert found["perplexity_delta"].value == pytest.approx(math.exp(1.4) - math.exp(0.9))
    assert found["perplexity_delta"].standard_error < found["perplexity"].standard_error  # the text's difficulty cancels
    same = by_name(summarise(tokens([0.0] * 10, nll=nll, base_nll=nll), tensor([0] * 4 + [1] * 4 + [2] * 2)))["perplexity_delta"]
    assert same.value == 0 and same.standard_error == 0


def test_slices_by_class_and_by_language_add_up_to_all():
    kl = [float(x) for x in range(12)]
    classes, language = tensor([0, 1, 2, 3] * 3), tensor([0] * 6 + [2] * 6)
    summary = summarise(tokens(kl), torch.arange(12) // 4, classes=classes, language=language, languages=("en", "zh", "de"))
    sliced = {(each.slice_kind, each.slice): each for each in summary.metrics if each.metric == "kl_mean_nats"}
    assert set(sliced) == {
        ("all", "all"),
        *product(["token_class"], ["digits", "code_symbols", "word_start", "other"]),
        ("language", "en"),
        ("language", "de"),
    }
    for kind in ("token_class", "language"):
        assert sum(each.value * each.n for (of, _), each in sliced.items() if of == kind) == pytest.approx(sum(kl))
    assert sliced["language", "de"].value == pytest.approx(8.5)


def test_one_language_is_no_slice_and_an_empty_class_is_none():
    summary = summarise(tokens([1.0, 2.0]), torch.arange(2), classes=tensor([2, 2]), language=tensor([0, 0]), languages=("en",))
    assert {(each.slice_kind, each.slice) for each in summary.metrics} == {("all", "all"), ("token_class", "word_start")}


def test_the_noise_of_the_engine_is_a_metric_of_the_base_alone():
    kl = tokens([1e-9, 3e-9])
    assert by_name(summarise(kl, torch.arange(2), is_base=True))["self_kl_nats"].value == pytest.approx(2e-9)
    assert "self_kl_nats" not in by_name(summarise(kl, torch.arange(2)))


def test_a_value_that_is_not_finite_is_none_and_says_so():
    """NaN sorts above everything in a database, and infinity tops a table."""
    found = by_name(summarise(tokens([1.0, math.nan, 2.0], nll=[1.0, 800.0, 5000.0]), torch.arange(3)))
    for name in ("kl_mean_nats", "kl_p50_nats", "kl_max_nats", "perplexity", "perplexity_delta"):
        assert found[name].value is None and found[name].status == "not_finite" and found[name].standard_error is None
    assert found["top1_agreement"].status == "ok"
    assert summarise(tokens([1.0, math.nan]), torch.arange(2)).items[2]["value"] is None


def test_an_item_a_window_so_that_variants_can_be_paired():
    items = summarise(tokens([1.0, 3.0, 5.0], nll=[1.0, 2.0, 3.0]), tensor([0, 0, 1])).items
    assert items == [
        {"item": 0, "metric": "kl_mean_nats", "value": 2.0}, {"item": 0, "metric": "nll_mean_nats", "value": 1.5},
        {"item": 1, "metric": "kl_mean_nats", "value": 5.0}, {"item": 1, "metric": "nll_mean_nats", "value": 3.0},
    ]  # fmt: skip


def test_every_finite_token_is_in_one_bin_of_the_histogram():
    kl = [-1e-8, 0.0, 1e-9, 1.5e-4, 0.02, 99.0, 1e6, math.nan]
    edges, counts = histogram(tensor(kl))
    assert sum(counts) == 7 and len(edges) == len(counts) + 1 == 56
    assert counts[0] == 3 and counts[-1] == 2
    (at,) = (index for index in range(len(counts)) if counts[index] and edges[index] < 0.02 <= edges[index + 1])
    assert edges[at + 1] / edges[at] == pytest.approx(10**0.2)
