"""What repetition, presence and frequency penalties and a bias do to logits, and whose history they look at."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.decode.penalties import bias, penalise_frequency, penalise_presence, penalise_repetition, places_of_rows, places_of_text
from assay.ops.decode.sampling import Sampling

CPU = torch.device("cpu")


def places(*histories, vocabulary):
    return places_of_rows([[history] for history in histories], vocabulary, CPU)


def test_a_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_negative_once_a_token():
    # Dividing a negative logit would make the repeat likelier, counting the second occurrence would give -4.
    logits = torch.tensor([[2.0, -1.0]])
    assert penalise_repetition(logits, places([0, 1, 1], vocabulary=2), 2.0).tolist() == [[1.0, -2.0]]
    assert logits.tolist() == [[2.0, -1.0]]


@given(logit=st.floats(-30, 30, width=32), penalty=st.floats(1.001, 5))
def test_a_repetition_penalty_above_one_never_makes_a_repeat_likelier(logit, penalty):
    assert float(penalise_repetition(torch.tensor([[logit, 0.5]]), places([0], vocabulary=2), penalty)[0, 0]) <= logit


def test_a_frequency_penalty_of_a_tenth_after_fifty_occurrences_is_five_logits():
    found = penalise_frequency(torch.zeros(1, 3), places([1] * 50 + [2], vocabulary=3), 0.1)
    assert found.tolist() == [[0.0, -5.0, pytest.approx(-0.1)]]


def test_a_presence_penalty_does_not_count():
    assert penalise_presence(torch.zeros(1, 3), places([1] * 50 + [2], vocabulary=3), 0.5).tolist() == [[0.0, -0.5, -0.5]]


def test_a_negative_presence_or_frequency_penalty_rewards():
    assert penalise_presence(torch.zeros(1, 2), places([1], vocabulary=2), -0.5).tolist() == [[0.0, 0.5]]
    assert penalise_frequency(torch.zeros(1, 2), places([1, 1], vocabulary=2), -0.5).tolist() == [[0.0, 1.0]]


def test_a_bias_is_added_to_its_ids_in_every_row():
    assert bias(torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), [(2, -1.0), (0, 0.5)]).tolist() == [[0.5, 1, 1], [3.5, 4, 4]]
    assert bias(torch.zeros(1, 2), [(1, -math.inf)]).tolist() == [[0, -math.inf]]


def test_a_bias_on_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="id 3"):
        bias(torch.zeros(1, 3), [(3, 1.0)])
    with pytest.raises(ValueError, match="id -1"):
        bias(torch.zeros(1, 3), [(-1, 1.0)])


def test_each_row_is_penalised_for_its_own_history():
    found = penalise_frequency(torch.zeros(3, 4), places([0, 0], [], [3], vocabulary=4), 1.0)
    assert found.tolist() == [[-2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, -1]]


def test_a_prompt_token_that_the_head_has_no_logit_for_is_left_out_and_a_pad_is_refused():
    assert places([1, 7, 2], [7], vocabulary=4).tolist() == [1, 2]  # 7 + 4 would be a place of the row after
    with pytest.raises(ValueError, match="id -100"):
        places([1, -100], vocabulary=4)


def test_consecutive_rows_of_a_text_come_after_one_token_more_each():
    found = places_of_text([5], [1, 2, 3], rows=3, vocabulary=10, device=CPU)
    assert found.tolist() == [5, 1, 15, 11, 12, 25, 21, 22, 23]
    assert places_of_text([5], [], rows=1, vocabulary=10, device=CPU).tolist() == [5]
    assert places_of_text([], [7], rows=2, vocabulary=10, device=CPU).tolist() == [17]


def test_more_rows_than_emitted_tokens_account_for_are_refused():
    with pytest.raises(ValueError, match="3 rows of one text and 1 emitted"):
        places_of_text([5, 6, 7], [1], rows=3, vocabulary=10, device=CPU)


# --- through Sampling ------------------------------------------------------------------------------------------------------------------------

PENALTIES = Sampling(0.9, 9, 0.95, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((3, 0.7),))
HISTORIES = st.lists(st.integers(0, 11), max_size=8)


@given(
    prompt=HISTORIES,
    emitted=st.lists(st.integers(0, 11), min_size=3, max_size=8),
    rows=st.integers(1, 4),
    count=st.sampled_from([None, True, False]),
)
def test_a_row_of_several_places_has_what_it_has_alone_with_the_tokens_before_it(prompt, emitted, rows, count):
    asked = Sampling(**{**vars(PENALTIES), "count_prompt": count})
    logits = torch.randn(rows, 12, generator=torch.Generator().manual_seed(len(emitted)))
    together = asked.probabilities(logits, prompt=prompt, emitted=emitted)
    for row in range(rows):
        alone = asked.probabilities(logits[row], prompt=prompt, emitted=emitted[: len(emitted) - (rows - 1 - row)])
        assert torch.equal(together[row], alone)


@given(prompts=st.lists(HISTORIES, min_size=1, max_size=4))
def test_a_text_beside_others_has_what_it_has_alone(prompts):
    logits = torch.randn(len(prompts), 12, generator=torch.Generator().manual_seed(1))
    emitteds = [list(reversed(prompt[:3])) for prompt in prompts]
    together = PENALTIES.probabilities_of_rows(logits, prompts, emitteds)
    for row, (prompt, emitted) in enumerate(zip(prompts, emitteds, strict=True)):
        assert torch.equal(together[row], PENALTIES.probabilities(logits[row], prompt=prompt, emitted=emitted))


def test_a_request_is_penalised_alike_alone_and_in_a_padded_batch():
    # Two rows, [pad, pad, 5, 6] and [7, 8, 9, 9] with pad 0: the history of the first is what its mask leaves.
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 9]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    logits = torch.linspace(-1, 1, 10).expand(2, 10)
    asked = Sampling(1.0, repetition_penalty=2.0)
    batch = asked.probabilities_of_rows(logits, [row[kept] for row, kept in zip(ids, mask, strict=True)], [[], []])
    assert torch.equal(batch[0], asked.probabilities(logits[0], prompt=[5, 6]))
    untouched = asked.adjust(logits[0], prompt=[5, 6])
    assert float(untouched[0]) == -1 and float(untouched[5]) != float(logits[0, 5])


def test_which_penalties_count_the_prompt_is_said_and_by_default_as_in_both_presets():
    logits, prompt, emitted = torch.ones(4), [0, 1, 1], [1, 2]
    repetition = {"repetition_penalty": 2.0}
    for asked, expected in [
        (Sampling(**repetition), [0.5, 0.5, 0.5, 1]),
        (Sampling(**repetition, count_prompt=True), [0.5, 0.5, 0.5, 1]),
        (Sampling(**repetition, count_prompt=False), [1, 0.5, 0.5, 1]),
        (Sampling(frequency_penalty=0.25), [1, 0.75, 0.75, 1]),
        (Sampling(frequency_penalty=0.25, count_prompt=True), [0.75, 0.25, 0.75, 1]),
        (Sampling(presence_penalty=0.25, count_prompt=True), [0.75, 0.75, 0.75, 1]),
        (Sampling(presence_penalty=0.25, count_prompt=False), [1, 0.75, 0.75, 1]),
    ]:
        assert asked.adjust(logits, prompt=prompt, emitted=emitted).tolist() == expected, asked


def test_greedy_decoding_honours_penalties_and_bias():
    logits = torch.tensor([3.0, 2.9, 1.0])
    assert Sampling().probabilities(logits, emitted=[0]).tolist() == [1, 0, 0]
    assert Sampling(repetition_penalty=1.2).probabilities(logits, emitted=[0]).tolist() == [0, 1, 0]
    assert Sampling(repetition_penalty=1.2).draw(logits, None, emitted=[0]) == 1
    assert Sampling(1.0, top_k=1, logit_bias=((2, 5.0),)).draw(logits, None) == 2
    assert Sampling(logit_bias=((0, -math.inf),)).draw(logits, None) == 1


def test_a_bias_that_forbids_every_token_leaves_no_distribution():
    asked = Sampling(1.0, logit_bias=((0, -math.inf), (1, -math.inf)))
    with pytest.raises(ValueError, match="row of logits"):
        asked.probabilities(torch.zeros(2))


def test_a_history_is_asked_for_only_where_a_penalty_counts_it():
    assert not Sampling(0.7, 50, 0.9, 0.1, 0.9, logit_bias=((1, 2.0),)).needs_history
    for penalty in ({"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": 0.1}):
        assert Sampling(**penalty).needs_history
    logits = torch.zeros(2, 3, 4)
    assert Sampling(1.0).probabilities(logits, emitted=[1]).shape == (2, 3, 4)
    assert Sampling(1.0, logit_bias=((1, 2.0),)).probabilities(logits).shape == (2, 3, 4)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) with penalties"):
        Sampling(presence_penalty=1.0).probabilities(logits, emitted=[1])
    with pytest.raises(ValueError, match="2 rows of logits, 1 prompts"):
        Sampling(presence_penalty=1.0).probabilities_of_rows(logits[0, :2], [[]], [[], []])


def test_ids_may_come_as_a_tensor():
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0))
    as_list = PENALTIES.probabilities(logits, prompt=[1, 2, 2], emitted=[5])
    assert torch.equal(as_list, PENALTIES.probabilities(logits, prompt=torch.tensor([1, 2, 2]), emitted=torch.tensor([5])))
