"""What surrounds a step, beside Dagster itself: a Ctrl-C is no fault to try again, wherever in the step it comes."""

from pathlib import Path

import dagster as dg
import pytest

from assay.assets.steps import RETRY, interrupted, step
from assay.schemas.experiment import Resources


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_outside_what_a_step_does_begins_no_other_try(tmp_path: Path, before: bool):
    """Before a step holds what it needs, and after it has let go: Dagster asks its retry policy of an interrupt as well."""
    tries = []

    def once() -> None:
        if len(tries) == 1:
            raise KeyboardInterrupt

    @dg.asset(retry_policy=RETRY)
    def first() -> None:
        tries.append(1)
        if before:
            once()
        with step(tmp_path, Resources()):
            pass
        if not before:
            once()

    @dg.asset(deps=[first])
    def second() -> None:
        raise AssertionError("begun after an interrupt")

    try:
        result = dg.materialize([first, second], raise_on_error=False)
        assert interrupted.is_set() and not result.success
        assert [event.step_key for event in result.all_events if event.is_step_failure] == ["first"]
    finally:
        interrupted.clear()


def test_a_passing_fault_is_tried_again_after_a_while():
    assert [RETRY.calculate_delay(attempt) for attempt in (1, 2)] == [5, 15]
