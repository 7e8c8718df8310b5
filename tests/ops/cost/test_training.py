"""What distillation costs beside training: the published shares."""

import pytest

from assay.ops.cost.training import device_hours, distillation_flops, teacher_share, training_flops


def test_p13_the_teacher_costs_0_6_from_15b_to_8b_and_2_9_from_70b_to_8b():
    assert teacher_share(15e9, 8e9) == 0.625 and teacher_share(70e9, 8e9) == pytest.approx(2.917, abs=1e-3)
    assert distillation_flops(15e9, 8e9, 94e9) / training_flops(8e9, 94e9) == 1.625


def test_a_qat_of_8b_with_itself_as_teacher_on_100b_tokens_is_6_4e21_flops_and_three_days_of_64_h100():
    work = distillation_flops(8e9, 8e9, 100e9)
    assert work == pytest.approx(6.4e21)
    assert device_hours(work, rate=989e12) / 64 / 24 == pytest.approx(2.9, abs=0.1)


def test_p14_94_billion_tokens_against_8_trillion_are_85_times_fewer_and_not_the_published_40():
    """40 is the paper's for a family in which the largest model was trained from scratch anyway."""
    assert pytest.approx(85.1, abs=0.1) == 8e12 / 94e9


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="teacher=0"):
        teacher_share(0, 8e9)
    with pytest.raises(ValueError, match="utilisation=2"):
        device_hours(1.0, rate=1.0, utilisation=2)
