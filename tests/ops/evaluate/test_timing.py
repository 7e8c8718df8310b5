"""Timing with clocks and counters that the test controls."""

from collections import namedtuple

import pytest
import torch

from assay.ops.evaluate import timing
from assay.ops.evaluate.timing import (
    NOISY_SHARE,
    Times,
    device_row_fields,
    interleave_times,
    measure_times,
    other_share,
    peak_rss_bytes,
    reset_peak_rss,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_warm_up_does_not_count_and_the_median_does():
    """First runs have been reported 10 to 30 times slow."""
    clock, durations, calls = Clock(), iter([30.0, 1.0, 5.0, 2.0]), []

    def work():
        calls.append(1)
        clock.now += next(durations)

    times = measure_times(work, repeats=3, warmup=1, clock=clock)
    assert times.seconds == (1.0, 5.0, 2.0) and times.median == 2.0 and len(calls) == 4
    assert times.spread == pytest.approx(1.2533 * 2.0817 / 3**0.5, rel=1e-3)


def test_what_is_compared_takes_turns():
    order: list[str] = []
    interleave_times({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2, warmup=1)
    assert order == ["a", "b"] * 3


def test_a_part_of_the_work_can_be_the_time():
    assert measure_times(lambda: 0.25, repeats=2, warmup=0).seconds == (0.25, 0.25)


def test_no_repeat_is_no_measurement_and_one_has_no_spread():
    with pytest.raises(ValueError, match="repeats=0"):
        measure_times(lambda: None, repeats=0)
    assert measure_times(lambda: None, repeats=1).spread is None


def test_the_share_of_others_worked_by_hand():
    assert other_share([(0.1, 2.0), (0.3, 2.0)]) == pytest.approx(0.1)
    assert other_share([(-0.01, 2.0)]) == 0 and other_share([(9.0, 2.0)]) == 1
    assert other_share([]) is None and other_share([(0.0, 0.0)]) is None


@pytest.mark.parametrize(("share", "status"), [(None, "ok"), (NOISY_SHARE, "ok"), (NOISY_SHARE + 0.01, "noisy")])
def test_a_timing_that_others_disturbed_says_so(share, status):
    assert Times((1.0,), share).status == status


def test_the_counters_of_the_system_are_read_around_each_repeat(monkeypatch):
    readings = iter([(0.0, 0.0), (0.5, 2.0), (0.5, 2.0), (0.5, 4.0)])
    monkeypatch.setattr(timing, "cpu_usage", lambda: next(readings))
    assert measure_times(lambda: None, repeats=2, warmup=0).other_cpu_share == pytest.approx(0.125)


def test_where_the_system_tells_nothing_the_share_is_unknown(monkeypatch):
    def unknown():
        raise OSError("no counters here")

    monkeypatch.setattr(timing.psutil, "cpu_times", unknown)
    times = measure_times(lambda: None, repeats=2, warmup=0)
    assert times.other_cpu_share is None and times.status == "ok"


def test_own_work_is_not_counted_as_that_of_others_and_stolen_time_is(monkeypatch):
    """Two CPUs for 10 s: 12 s busy and 1 s stolen, of which 9 s were this process: 4 of 20 were others'."""
    Counters = namedtuple("Counters", "user system idle iowait steal")
    readings = iter([Counters(100, 50, 200, 5, 1), Counters(110, 52, 206, 6, 2)])
    own = iter([3.0, 12.0])
    monkeypatch.setattr(timing.psutil, "cpu_times", lambda: next(readings))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(own))
    before, after = timing.cpu_usage(), timing.cpu_usage()
    assert other_share([(after[0] - before[0], after[1] - before[1])]) == pytest.approx(4 / 20)


def test_a_device_is_described_by_what_it_is():
    fields = device_row_fields()
    assert set(fields) == {"kind", "name", "cores", "memory_bytes", "torch_version", "driver"}
    assert fields["kind"] in ("cpu", "cuda") and fields["name"] and fields["cores"] >= 1 and fields["memory_bytes"] > 2**28
    assert fields["torch_version"] == torch.__version__


def test_the_peak_forgets_what_was_freed_and_sees_what_is_taken():
    taken = torch.ones(60 << 20)
    high = peak_rss_bytes()
    del taken
    if not reset_peak_rss():
        pytest.skip("this system cannot reset the peak")
    low = peak_rss_bytes()
    assert high - low > 100 << 20
    again = torch.ones(60 << 20)
    assert peak_rss_bytes() - low > 100 << 20 and again.sum() > 0
