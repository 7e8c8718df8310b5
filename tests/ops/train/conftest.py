"""What tests of recovery share: a teacher, and its first block as a student."""

import copy

import pytest

from assay.ops.models.early_exit import early_exit


@pytest.fixture(scope="module")
def teacher(teacher_of):
    return teacher_of()


@pytest.fixture
def student(teacher):
    return early_exit(copy.deepcopy(teacher), 1)
