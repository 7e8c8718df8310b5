"""Measuring a device: how times become constants, on a clock that is known; and that a real run gives every kind of row."""

import pytest

from assay.ops.cost.device import measure_device, repeat


class Clock:
    """Seconds that only a call of :meth:`work` takes."""

    def __init__(self, seconds):
        self.now, self.seconds, self.calls = 0.0, seconds, 0

    def __call__(self):
        return self.now

    def work(self):
        self.calls += 1
        self.now += self.seconds


def test_a_slow_call_is_repeated_at_least_three_times_and_a_fast_one_until_the_time_is_up():
    slow, fast = Clock(2.0), Clock(0.01)
    assert repeat(slow.work, seconds=1.0, clock=slow).seconds == (2.0, 2.0, 2.0)
    times = repeat(fast.work, seconds=0.095, clock=fast)
    assert len(times.seconds) == 10 and times.median == pytest.approx(0.01)


def test_a_call_that_is_too_short_for_the_clock_is_timed_by_the_hundred():
    clock = Clock(1e-6)
    times = repeat(clock.work, seconds=1.0, repeats=(3, 5), clock=clock)
    assert times.median == pytest.approx(1e-6) and clock.calls == 2 + 5 * 100


def test_a_real_run_has_every_constant_once_with_its_unit_and_amount():
    rows = measure_device(sizes=(4096, 8192), squares=(16,), seconds_each=0.002)
    names = [(row.constant, row.dtype, row.size) for row in rows]
    assert len(set(names)) == len(names)
    assert {row.constant: row.unit for row in rows} == {
        "launch_overhead": "s",
        "read_bandwidth": "B/s",
        "copy_bandwidth": "B/s",
        "matmul_rate": "FLOP/s",
    }
    assert {"float32", "bfloat16"} <= {row.dtype for row in rows if row.constant == "matmul_rate"}
    assert {row.size: row.amount for row in rows if row.constant == "copy_bandwidth"} == {"0.00390625 MiB": 8192, "0.0078125 MiB": 16_384}
    assert {row.amount for row in rows if row.size == "16x16x16"} == {2 * 16**3}
    assert all(row.value > 0 and row.status in ("ok", "noisy") for row in rows)
