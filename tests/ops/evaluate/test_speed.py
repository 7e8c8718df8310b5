"""Rates of decoding: what is counted, and what is timed."""

import time

import pytest

from assay.ops.decode.forward import TorchRunner
from assay.ops.decode.generate import generate
from assay.ops.decode.weights import weights_of
from assay.ops.evaluate.speed import TimedDraft, count_decode, decode_speeds, emitted, prefill_speed, rate
from assay.ops.evaluate.timing import Times


def test_emitted_tokens_until_each_rows_end_worked_by_hand():
    """Prefill 1 s, ten steps of 0.1 s, batch 2, one row ends at its fourth: 14 tokens, 14/s, and 7/s end to end.

    Counting what a batch computes for a row that has ended, the prefill's own token, or the prefill's time gives 20, 16 and 7.
    """
    eos = 9
    rows = [[1] + [2] * 10, [1, 2, 2, 2, eos] + [7] * 6]
    assert count_decode(rows, eos_ids={eos}, prefill_seconds=1.0, decode_seconds=1.0) == (14, 14.0, 7.0)
    assert count_decode(rows, prefill_seconds=1.0, decode_seconds=1.0).tokens == 20
    assert count_decode([[eos, 1, 1]], eos_ids={eos}, prefill_seconds=1.0, decode_seconds=1.0).tokens == 0


def test_a_rate_is_tokens_over_the_median_time():
    found = rate(100, Times((1.0, 4.0, 2.0), 0.01))
    assert found.tok_s == 50 and found.standard_error == pytest.approx(100 * found.times.spread / 4)


def test_each_prefill_begins_with_an_empty_cache_and_keeps_one_row_of_logits(tl8):
    caches, kept = [], []

    class Counting(TorchRunner):
        def forward(self, cache, step):
            caches.append(id(cache))
            kept.append((step.slots[0].item(), len(step.keep)))
            return super().forward(cache, step)

    found = prefill_speed(Counting(*weights_of(tl8)), [[1] * 30] * 2, kv_format="int8", repeats=3, warmup=2)
    assert kept == [(0, 2)] * 5 and len(found.times.seconds) == 3
    assert found.tok_s == pytest.approx(60 / found.times.median)


def test_the_prefill_is_not_in_the_time_of_decoding_and_its_token_is_not_counted(tl8):
    texts = generate(TorchRunner(*weights_of(tl8)), [[3, 4], [5]], max_new_tokens=11, clock=iter([0.0, 1.0, 2.0]).__next__)
    assert emitted(texts) == (20, 1.0)


def test_the_time_of_proposals_is_taken_apart():
    class Draft:
        name = "inner"

        def propose(self, requests, counts, *, sampling):
            time.sleep(0.01)
            return counts

    draft = TimedDraft(Draft())
    assert draft.propose([], [3], sampling=None) == [3] and draft.name == "inner"
    first = draft.seconds
    draft.propose([], [3], sampling=None)
    assert first >= 0.01 and draft.seconds >= first + 0.01
    draft.reset()
    assert draft.seconds == 0


def test_with_and_without_a_draft_take_turns():
    order = []

    def run(name, tokens, seconds):
        order.append(name)
        return tokens, seconds

    runs = {"plain": lambda: run("plain", 10, 2.0), "drafted": lambda: run("drafted", 10, 1.0)}
    found = decode_speeds(runs, repeats=2, warmup=1)
    assert order == ["plain", "drafted"] * 3
    assert {name: rate.tok_s for name, rate in found.items()} == {"plain": 5, "drafted": 10}
