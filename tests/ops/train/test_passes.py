"""Final states, states after blocks, and documents that share a row and see nothing of one another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.train.passes import block_outputs, document_positions, final_states, rounded_products


@pytest.fixture(scope="module")
def teacher(teacher_of):
    return teacher_of()


def test_states_before_the_padding_are_those_of_the_row_alone(teacher):
    row = torch.tensor([[5, 9, 17, 33]])
    padded = torch.cat([row, torch.zeros(1, 3, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        assert torch.allclose(final_states(teacher, padded)[:, :4], final_states(teacher, row), atol=1e-5)


def test_a_document_begins_after_an_end_worked_by_hand():
    ids = torch.tensor([[5, 2, 6, 7, 2, 2, 8], [2, 5, 6, 7, 8, 9, 2]])
    assert document_positions(ids, {2}).tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_documents_in_a_row_are_the_documents_alone(lengths, teacher):
    """Whatever stands before it, the states of a document are those of a row of its own; without the ends they are not."""
    random = torch.Generator().manual_seed(sum(lengths))
    documents = [torch.cat([torch.randint(3, 64, (length,), generator=random), torch.tensor([2])]) for length in lengths]
    row = torch.cat(documents)[None]
    with torch.no_grad():
        alone = torch.cat([final_states(teacher, document[None])[0] for document in documents])
        rows = final_states(teacher, row.expand(2, -1), document_ends={2})
        assert torch.allclose(rows[0], alone, atol=1e-5) and torch.allclose(rows[1], alone, atol=1e-5)
        if len(lengths) > 1:
            assert not torch.allclose(final_states(teacher, row)[0], alone, atol=1e-2)


def test_the_outputs_of_blocks_are_what_transformers_calls_hidden_states(teacher, text):
    ids = text(2)
    with torch.no_grad(), block_outputs(teacher, [1, 0, 1]) as found:
        states = teacher(ids, output_hidden_states=True).hidden_states
    assert sorted(found) == [0, 1] and torch.equal(found[0], states[1]) and torch.equal(found[1], states[2])
    before = dict(found)
    final_states(teacher, text(3))
    assert all(found[number] is before[number] for number in (0, 1))  # the hooks are gone
    with (
        pytest.raises(ValueError, match=r"blocks \[3\] of LlamaForCausalLM, which has 3; numbers from 0 to 2"),
        block_outputs(teacher, [3]),
    ):
        pass


def test_rounded_products_are_within_the_rounding_of_their_entries_and_end_where_they_are_left():
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 96, generator=random) for _ in range(2))
    exact, size = left.double() @ right.double().T, left.double().abs() @ right.double().abs().T
    before, plain = torch.backends.mkldnn.matmul.fp32_precision, left @ right.T
    with pytest.raises(KeyError), rounded_products(True):
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        found = left @ right.T
        raise KeyError
    assert found.dtype == torch.float32 and ((found.double() - exact).abs() <= 2**-7 * size).all()
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    with rounded_products(False):
        assert torch.equal(left @ right.T, plain)
