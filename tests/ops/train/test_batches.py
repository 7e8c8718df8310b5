"""Which windows a step reads, and which of its rows are marked: whole numbers, the same for a seed, nothing twice before all were read."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.train.batches import Batch, generator, marked, packed, rows_at, seed_of, split


def test_windows_lie_one_after_another_and_the_rest_is_left_out():
    assert packed(torch.arange(11), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(ValueError, match="2 tokens do not fill one window of 3"):
        packed(torch.arange(2), 3)


@given(windows=st.integers(1, 30), rows=st.integers(1, 12), passes=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_window_is_read_once_before_any_is_read_again(windows, rows, passes, seed):
    steps = -(-passes * windows // rows)
    read = torch.cat([rows_at(step, rows=rows, windows=windows, seed=seed) for step in range(steps)]).tolist()
    for begin in range(0, passes * windows, windows):
        assert sorted(read[begin : begin + windows]) == list(range(windows))


def test_the_order_is_drawn_anew_for_each_pass_and_each_seed():
    first, second = (rows_at(step, rows=40, windows=40, seed=0).tolist() for step in (0, 1))
    other = rows_at(0, rows=40, windows=40, seed=1).tolist()
    assert first != second and first != other and first == rows_at(0, rows=40, windows=40, seed=0).tolist()


@given(rows=st.integers(1, 16), pct=st.integers(0, 100), steps=st.integers(1, 40))
def test_the_marked_rows_are_their_share_of_every_beginning_of_a_run(rows, pct, steps):
    found = torch.cat([marked(step, rows=rows, pct=pct) for step in range(steps)])
    counts = found.cumsum(0).tolist()
    assert counts == [count * pct // 100 for count in range(1, rows * steps + 1)]


def test_marked_rows_worked_by_hand_and_impossible_shares():
    assert marked(0, rows=4, pct=50).tolist() == [False, True, False, True]
    assert marked(0, rows=3, pct=100).tolist() == [True, True, True] and not marked(7, rows=3, pct=0).any()
    with pytest.raises(ValueError, match="101 percent of the rows; 0 to 100"):
        marked(0, rows=1, pct=101)


@given(rows=st.integers(1, 20), length=st.integers(1, 8), tokens=st.integers(1, 64))
def test_parts_hold_every_row_once_and_no_more_tokens_than_allowed(rows, length, tokens):
    ids = torch.arange(rows * length).reshape(rows, length)
    whole = Batch(ids, ids % 2 == 0, torch.arange(rows) % 3 == 0, torch.arange(rows))
    parts = split(whole, tokens)
    assert all(torch.equal(torch.cat(found), each) for found, each in zip(zip(*parts, strict=True), whole, strict=True))
    assert all(part.ids.numel() <= max(tokens, length) for part in parts)
    assert max(len(part.ids) for part in parts) - min(len(part.ids) for part in parts) <= 1


def test_seeds_of_different_parts_differ_and_are_the_same_in_every_process():
    assert len({seed_of(seed, purpose, step) for seed in range(5) for purpose in ("order", "sample") for step in range(5)}) == 50
    assert seed_of(1, "2") != seed_of(12) and 0 <= seed_of(0) < 2**63
    assert seed_of(0, "step", 3) == int(hashlib.sha256(b"(0, 'step', 3)").hexdigest()[:16], 16) // 2
    assert torch.rand(2, generator=generator(0, "x")).tolist() == torch.rand(2, generator=generator(0, "x")).tolist()
