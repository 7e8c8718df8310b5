"""Telling rounding from a fault where two greedy texts part."""

import math

import pytest
import torch

from assay.ops.decode.difference import Difference, first_difference
from assay.ops.decode.generate import generate

PROMPT = [5, 17, 90, 3, 44]
pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # they are checked where the same loops are tested


def plainly(runner, length, **more):
    return generate(runner, [PROMPT], max_new_tokens=length, **more)[0].tokens


def test_equal_texts_have_no_difference(tl8, run):
    plain = plainly(run(tl8), 6)
    assert first_difference(run(tl8), PROMPT, plain, list(plain), block=3) is None


@pytest.mark.parametrize("position", [0, 1, 7, 11])
def test_a_wrong_token_is_a_fault_with_the_gap_of_its_logit(tl8, run, full_logits, position):
    plain = plainly(run(tl8), 12)
    wrong = [*plain]
    wrong[position] = (wrong[position] + 1) % 128
    logits = full_logits(tl8, PROMPT + plain[:position])[-1]
    found = first_difference(run(tl8), PROMPT, plain, wrong, block=5)
    assert found is not None and not found.near_tie
    assert found.position == position
    assert found.gap == pytest.approx(float(logits[plain[position]] - logits[wrong[position]]), abs=1e-4)
    assert found.noise < 1e-4


def test_two_tokens_with_the_same_logit_are_a_near_tie(tl8, run):
    plain = plainly(run(tl8), 6)
    twin = next(token for token in range(128) if token not in plain)
    with torch.no_grad():
        tl8.lm_head.weight[twin] = tl8.lm_head.weight[plain[4]]
    other = [*plain[:4], twin, 1]
    found = first_difference(run(tl8), PROMPT, plain, other, block=3)
    assert found is not None and found.near_tie
    assert (found.position, found.gap) == (4, pytest.approx(0, abs=1e-5))


def test_a_text_that_merely_ends_early_is_a_fault(tl8, run):
    plain = plainly(run(tl8), 6)
    found = first_difference(run(tl8), PROMPT, plain, plain[:4], block=3)
    assert found is not None and not found.near_tie
    assert (found.position, found.gap) == (4, math.inf)


def test_the_noise_is_of_the_cache_that_the_texts_were_made_with(tl8, run, record_forwards):
    runner = run(tl8)
    forwards = record_forwards(runner)
    plain = plainly(runner, 12, kv_format="fp8_e4m3")
    wrong = [*plain[:11], (plain[11] + 1) % 128]
    row = forwards[-1][0][1][0]
    found = first_difference(runner, PROMPT, plain, wrong, block=5, kv_format="fp8_e4m3")
    assert found is not None
    assert found.gap == float(row[plain[11]] - row[wrong[11]])  # the same forwards, so the same bits
    unquantized = first_difference(runner, PROMPT, plain, wrong, block=5)
    assert unquantized is not None and abs(unquantized.gap - found.gap) > 1e-3


def test_a_near_tie_is_within_twice_the_noise():
    assert Difference(3, 0.2, 0.1).near_tie
    assert not Difference(3, 0.21, 0.1).near_tie
