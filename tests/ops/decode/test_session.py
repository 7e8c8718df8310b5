"""Texts and their cache: what is read in which forwards, taken back, and refused."""

import pytest
import torch

from assay.ops.decode.session import TOGETHER, Session, check_prompt, check_prompts, strip_padding

LONG = [3 + index % 120 for index in range(100)]


@pytest.fixture
def watched(tl8, run):
    """A runner, and (tokens of each row, kept logits) of each of its forwards."""
    runner, seen = run(tl8), []
    forward = runner.forward

    def watch(cache, step):
        seen.append(([step.rows.tolist().count(row) for row in range(cache.rows)], len(step.keep)))
        return forward(cache, step)

    runner.forward = watch
    return runner, seen


def test_long_texts_are_read_alone_in_chunks_and_short_ones_together(watched):
    runner, seen = watched
    session = Session(runner, rows=4, capacity=128, chunk=40)
    found = session.read([LONG, LONG[:3], [], LONG[:TOGETHER]], keep=[1, 2, 0, 1])
    assert seen == [([40, 0, 0, 0], 0), ([40, 0, 0, 0], 0), ([20, 0, 0, 0], 1), ([0, 3, 0, 32], 3)]
    assert [len(logits) for logits in found] == [1, 2, 0, 1]


def test_logits_that_reach_over_chunks_are_all_there(watched):
    runner, seen = watched
    whole = Session(runner, capacity=128, chunk=128).read([LONG], keep=100)[0]
    seen.clear()
    part = Session(runner, capacity=128, chunk=40).read([LONG], keep=65)[0]
    assert [kept for _, kept in seen] == [5, 40, 20]
    assert torch.allclose(part, whole[-65:], atol=1e-4)


def test_a_long_text_is_the_same_to_the_bit_whoever_reads_beside_it(tl8, run):
    runner = run(tl8)
    alone = Session(runner, capacity=128, chunk=48).read([LONG], keep=100)[0]
    for place, neighbours in ((0, [LONG[1:], [5]]), (1, [[], LONG[:40]]), (2, [LONG[7:90], LONG[3:]])):
        ids = [*neighbours]
        ids.insert(place, LONG)
        found = Session(runner, rows=3, capacity=128, chunk=48).read(ids, keep=[100 if row == place else 0 for row in range(3)])[place]
        assert torch.equal(found, alone)


def test_a_session_counts_what_its_texts_hold(tl8, run):
    session = Session(run(tl8), rows=2, capacity=8, kv_format="int8")
    session.read([[5, 6, 7], [8]], keep=0)
    session.rollback([2, 0])
    assert (session.rows, session.lengths, session.cache.format) == (2, [1, 1], "int8")


def test_no_logits_are_an_empty_tensor(watched):
    runner, seen = watched
    session = Session(runner, rows=2, capacity=128)
    for logits in (*session.read([[5], LONG], keep=0), *session.read([[], []])):
        assert logits.shape == (0, 128)
    assert len(seen) == 2  # nothing to read is no forward


def test_a_read_that_cannot_be_changes_no_row(tl8, run):
    session = Session(run(tl8), rows=2, capacity=50)
    session.read([LONG[:40], [7]])
    for ids, keep, message in (
        ([[5]], 1, "tokens for 1 rows in a session of 2"),
        ([LONG[:40], [5]], 1, "row 0 holds 40 tokens and is to read 40 more, but its cache has room for 50"),
        ([[5], [6]], 2, "row 0 reads 1 tokens, and the logits of 2 are wanted"),
        ([[5], []], [1, 1], "row 1 reads 0 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            session.read(ids, keep=keep)
    assert session.lengths == [40, 1]
    with pytest.raises(ValueError, match="chunk=0"):
        Session(run(tl8), capacity=4, chunk=0)


def test_pads_on_either_side_are_stripped_and_holes_refused():
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 0, 0], [1, 2, 3, 4]])
    assert strip_padding(ids, torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])) == [[5, 6], [7, 8], [1, 2, 3, 4]]
    assert strip_padding(ids[:1], torch.tensor([[0, 1, 1, 1]])) == [[0, 5, 6]]  # an id that is also the pad's counts where the mask says so
    for mask in ([1, 0, 1, 1], [0, 0, 0, 0], [2, 2, 2, 2]):
        with pytest.raises(ValueError, match=r"row 0 has the attention mask"):
            strip_padding(ids[:1], torch.tensor([mask]))


def test_prompts_come_as_lists_or_as_a_tensor():
    assert check_prompts([[1, 2], [3]], 4) == [[1, 2], [3]]
    assert check_prompts(torch.tensor([[1, 2], [3, 0]]), 4) == [[1, 2], [3, 0]]
    assert check_prompt(torch.tensor([[1, 2]]), 4) == check_prompt([1, 2], 4) == [1, 2]
    for wrong, message in (
        ([], "no prompt"),
        ([[]], "no tokens"),
        ([[1], [4]], "4, outside"),
        ([[-1]], "-1, outside"),
        (torch.tensor([1, 2]), r"shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            check_prompts(wrong, 4)
    with pytest.raises(ValueError, match="batch of 2"):
        check_prompt(torch.zeros(2, 3, dtype=torch.long), 4)
    with pytest.raises(ValueError, match="list of lists"):
        check_prompt([[1, 2]], 4)
