"""Rates of decoding: what is counted, and what is timed."""

import pytest
import torch

from assay.ops.evaluate.speed import batch_decode, count_decode, decode_speeds, prefill_speed, rate
from assay.ops.evaluate.timing import Times
from assay.ops.kv.cache import make_cache


class Clock:
    """Moves by what the test says, at each forward of the model that it is hooked to."""

    def __init__(self, model, first: float, later: float):
        self.now, steps = 0.0, iter([first])
        model.register_forward_hook(lambda *_: self.add(next(steps, later)))

    def add(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


def test_emitted_tokens_until_each_rows_end_worked_by_hand():
    """Prefill 1 s, ten steps of 0.1 s, batch 2, one row ends at its fourth: 14 tokens, 14/s, and 7/s end to end.

    Counting what a batch computes for a row that has ended, the prefill's own token, or the prefill's time gives 20, 16 and 7.
    """
    eos = 9
    rows = [[1] + [2] * 10, [1, 2, 2, 2, eos] + [7] * 6]
    assert count_decode(rows, eos_ids={eos}, prefill_seconds=1.0, decode_seconds=1.0) == (14, 14.0, 7.0)
    assert count_decode(rows, prefill_seconds=1.0, decode_seconds=1.0).tokens == 20
    assert count_decode([[eos, 1, 1]], eos_ids={eos}, prefill_seconds=1.0, decode_seconds=1.0).tokens == 0


def test_the_prefill_is_not_in_the_time_of_decoding(tl8):
    clock = Clock(tl8, first=1.0, later=0.1)
    ids = torch.randint(3, 128, (2, 6), generator=torch.Generator().manual_seed(0))
    tokens, seconds = batch_decode(tl8, ids, new_tokens=11, cache=make_cache(tl8), clock=clock)
    assert tokens.shape == (2, 11) and seconds == pytest.approx(1.0)
    assert count_decode(tokens.tolist(), prefill_seconds=clock() - seconds, decode_seconds=seconds)[0] == 20


def test_a_batch_decodes_what_full_forwards_say(tl8):
    ids = torch.randint(3, 128, (3, 6), generator=torch.Generator().manual_seed(0))
    tokens, _ = batch_decode(tl8, ids, new_tokens=8, cache=make_cache(tl8))
    with torch.inference_mode():
        logits = tl8(input_ids=torch.cat([ids, tokens], dim=1)).logits
    assert tokens.equal(logits[:, 5:-1].argmax(dim=-1))


def test_a_rate_is_tokens_over_the_median_time():
    found = rate(100, Times((1.0, 4.0, 2.0), 0.01))
    assert found.tok_s == 50 and found.standard_error == pytest.approx(100 * found.times.spread / 4)


def test_each_prefill_begins_with_an_empty_cache_and_keeps_one_row_of_logits(tl8):
    lengths, shapes = [], []

    def fresh():
        lengths.append(0)
        return make_cache(tl8)

    tl8.lm_head.register_forward_hook(lambda module, given, logits: shapes.append(tuple(logits.shape[:2])))
    found = prefill_speed(tl8, torch.ones(2, 30, dtype=torch.int64), make_cache=fresh, repeats=3, warmup=2)
    assert len(lengths) == 5 and set(shapes) == {(2, 1)} and len(found.times.seconds) == 3
    assert found.tok_s == pytest.approx(60 / found.times.median)


def test_with_and_without_a_draft_take_turns():
    order = []

    def run(name, tokens, seconds):
        order.append(name)
        return tokens, seconds

    runs = {"plain": lambda: run("plain", 10, 2.0), "drafted": lambda: run("drafted", 10, 1.0)}
    found = decode_speeds(runs, repeats=2, warmup=1)
    assert order == ["plain", "drafted"] * 3
    assert {name: rate.tok_s for name, rate in found.items()} == {"plain": 5, "drafted": 10}
