"""Each target once, one BOS at most, and pads never scored."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.evaluate.windows import batches, bos_of, perplexity, windows


def test_twenty_tokens_in_windows_of_ten_by_five_worked_by_hand():
    """The boundary tokens are where strided perplexity goes wrong: scored twice, or never."""
    assert windows(20, 10, 5) == [(0, 10, 1), (5, 15, 10), (10, 20, 15)]


@given(count=st.integers(2, 300), window=st.integers(2, 60), data=st.data())
def test_every_target_is_scored_once_with_the_context_that_was_promised(count, window, data):
    stride = data.draw(st.integers(1, window - 1))
    cover = windows(count, window, stride)
    scored = [target for each in cover for target in range(each.first, each.stop)]
    assert scored == list(range(1, count))
    for each in cover:
        assert each.stop - each.start <= window
        assert each.first - each.start >= (window - stride if each.start else 1)
        assert each.first < each.stop


@given(count=st.integers(2, 80), window=st.integers(2, 20), batch=st.integers(1, 5), bos=st.sampled_from([None, 99]), data=st.data())
def test_batches_score_each_target_once_from_the_token_before_it(count, window, batch, bos, data):
    stride, side = data.draw(st.integers(1, window - 1)), data.draw(st.sampled_from(["left", "right"]))
    ids = torch.arange(count) + 100
    seen = []
    for each in batches(ids, windows(count, window, stride), batch=batch, bos=bos, pad=7, side=side):
        assert each.ids[each.rows, each.columns].equal(each.targets - 1)  # ids count up: the predecessor is one less
        assert each.mask[each.rows, each.columns].all() and each.ids[each.mask == 0].eq(7).all()
        assert (each.ids == 99).sum(dim=1).eq(int(bos is not None)).all()
        seen += each.at.tolist()
    assert seen == list(range(1, count))


@pytest.mark.parametrize("stride", [0, 10, 11])
def test_a_stride_that_would_leave_out_tokens_is_refused(stride):
    with pytest.raises(ValueError, match="never scored"):
        windows(20, 10, stride)
    with pytest.raises(ValueError, match="no target"):
        windows(1, 10, 5)


def test_perplexity_is_over_tokens_and_not_a_mean_of_windows():
    """Eight targets of 1 nat and two of 3, in windows of 4, 4 and 2."""
    nll = [1.0] * 8 + [3.0] * 2
    assert perplexity(nll) == pytest.approx(4.055, abs=5e-4)
    window_means = [1.0, 1.0, 3.0]
    assert math.exp(sum(window_means) / 3) == pytest.approx(5.294, abs=5e-4)  # the mean of window means
    assert sum(map(math.exp, window_means)) / 3 == pytest.approx(8.507, abs=5e-4)  # the mean of window perplexities


@pytest.mark.parametrize(
    ("adds", "rule", "expected"), [(True, "tokenizer", 1), (False, "tokenizer", None), (True, "never", None), (False, "never", None)]
)
def test_a_bos_is_put_in_front_only_where_the_tokenizer_puts_one_itself(tl8_dir, adds, rule, expected):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tl8_dir)
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert bos_of(tokenizer, rule) == expected


def test_a_window_that_begins_with_the_bos_gets_no_second_one():
    """Two BOS, or none, have shifted published scores by an order of magnitude."""
    ids = torch.tensor([1, 5, 6, 7, 8, 9])
    (only,) = batches(ids, windows(6, 4, 3), batch=2, bos=1)
    assert only.ids.tolist() == [[1, 5, 6, 7], [1, 7, 8, 9]]
    assert only.targets.tolist() == [5, 6, 7, 8, 9]
