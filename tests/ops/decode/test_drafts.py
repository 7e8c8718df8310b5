"""The two drafts alone: what they propose, and what stays of it."""

import copy
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.decode.drafts import ModelDraft, NGramDraft
from assay.ops.decode.generate import generate
from assay.ops.decode.sampling import Sampling

GREEDY = Sampling()


def proposed(draft, text, count=4):
    return draft.propose(text, count, sampling=GREEDY, generator=None).tokens


def looked_up(text, n, count):
    """The definition, by scanning: the longest ending found earlier, most recent place first, read on into its own continuation."""
    for length in range(min(n, len(text)), 0, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                grown = list(text)
                for offset in range(count):
                    grown.append(grown[start + length + offset])
                return grown[len(text) :]
    return []


def ngram(text, n=3):
    draft = NGramDraft(n)
    draft.begin(text, vocabulary=128)
    return draft


def test_the_longest_ending_wins_over_a_more_recent_shorter_one():
    text = [1, 2, 3, 50, 51, 9, 3, 60, 1, 2, 3]
    assert proposed(ngram(text), text) == [50, 51, 9, 3]
    assert proposed(ngram(text, n=1), text) == [60, 1, 2, 3]


def test_of_equally_long_endings_the_most_recent_counts():
    text = [1, 2, 70, 1, 2, 80, 1, 2]
    assert proposed(ngram(text), text, count=1) == [80]


def test_nothing_is_proposed_for_an_ending_that_is_new():
    assert proposed(ngram([1, 2, 3, 4]), [1, 2, 3, 4]) == []
    assert proposed(ngram([1]), [1]) == []


def test_a_repeating_text_is_proposed_further_with_its_period():
    text = [9, 5, 6, 5, 6, 5]
    assert proposed(ngram(text), text, count=5) == [6, 5, 6, 5, 6]
    assert proposed(ngram([7, 7]), [7, 7], count=3) == [7, 7, 7]


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    first=st.integers(1, 40),
    n=st.integers(1, 4),
    count=st.integers(1, 6),
    step=st.integers(1, 5),
)
def test_growing_the_index_finds_what_a_scan_of_the_whole_text_finds(text, first, n, count, step):
    draft = NGramDraft(n)
    draft.begin(text[:first], vocabulary=128)
    for end in range(min(first, len(text)), len(text) + 1, step):
        assert proposed(draft, text[:end], count) == looked_up(text[:end], n, count)


def test_a_new_prompt_forgets_the_old_one():
    draft = ngram([1, 2, 3, 1, 2])
    draft.begin([4, 1, 2], vocabulary=128)
    assert proposed(draft, [4, 1, 2]) == []


def test_a_round_costs_no_more_in_a_long_text():
    def seconds(length):
        text = torch.randint(0, 50_000, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        draft = ngram(text)
        best = float("inf")
        for _ in range(200):
            text.append(text[len(text) // 2])
            begun = time.perf_counter()
            proposed(draft, text)
            best = min(best, time.perf_counter() - begun)
        return best

    assert seconds(200_000) < 20 * seconds(200)  # a scan would take 1000 times as long


def test_a_model_draft_proposes_its_own_greedy_continuation_after_every_rollback(make_llama):
    model = make_llama(layers=2, seed=3)
    draft = ModelDraft(copy.deepcopy(model))
    reads: list[int] = []
    draft.model.register_forward_pre_hook(
        lambda module, arguments, keywords: reads.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    text = [5, 17, 90, 3]
    draft.begin(text, vocabulary=128)
    assert reads == [4]
    text.append(11)
    unread = 1
    for accepted in (4, 0, 2, 1, 3, 4, 4, 0, 0):
        proposal = draft.propose(text, 4, sampling=GREEDY, generator=None)
        assert proposal.probabilities is None
        assert proposal.tokens == generate(model, text, max_new_tokens=4).tokens
        assert reads[-4:] == [unread, 1, 1, 1]  # no row that could be kept was read again
        draft.settle(accepted)
        unread = 2 if accepted == 4 else 1  # the fourth proposal was drawn, never read
        text += [*proposal.tokens[:accepted], 100 + accepted]


@pytest.mark.parametrize("sampling", [Sampling(1.5), Sampling(2.0, top_k=9), Sampling(2.0, top_p=0.8), Sampling(2.0, min_p=0.05)])
def test_a_model_draft_draws_from_the_distribution_that_it_reports_filters_included(make_llama, sampling):
    model = make_llama(layers=2, seed=3)
    draft = ModelDraft(model)
    generator = torch.Generator().manual_seed(0)
    text = [5, 17, 90, 3]
    draft.begin(text, vocabulary=128)
    text.append(11)
    for accepted in (3, 0, 2, 1, 3):
        proposal = draft.propose(text, 3, sampling=sampling, generator=generator)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text + proposal.tokens]), use_cache=False).logits[0, len(text) - 1 : -1]
        assert torch.allclose(proposal.probabilities, sampling.probabilities(logits), atol=1e-4)
        assert all(proposal.probabilities[row, token] > 0 for row, token in enumerate(proposal.tokens))
        draft.settle(accepted)
        text += [*proposal.tokens[:accepted], 100 + accepted]


def test_a_wider_draft_never_proposes_beyond_the_shared_vocabulary(make_llama):
    draft = ModelDraft(make_llama(vocab=160, layers=1))
    draft.begin([5, 6], vocabulary=128)
    proposal = draft.propose([5, 6, 7], 30, sampling=Sampling(50.0), generator=torch.Generator().manual_seed(0))
    assert proposal.probabilities.shape == (30, 128)
    assert torch.allclose(proposal.probabilities.sum(-1), torch.ones(30))
    assert max(proposal.tokens) < 128


def test_a_narrower_draft_gives_the_ids_that_it_lacks_probability_zero(make_llama):
    draft = ModelDraft(make_llama(vocab=100, layers=1))
    draft.begin([5, 6], vocabulary=128)
    proposal = draft.propose([5, 6, 7], 30, sampling=Sampling(50.0), generator=torch.Generator().manual_seed(0))
    assert proposal.probabilities.shape == (30, 128)
    assert not proposal.probabilities[:, 100:].any()


def test_a_narrower_draft_refuses_a_prompt_and_falls_silent_at_a_token_that_it_does_not_know(make_llama):
    draft = ModelDraft(make_llama(vocab=100, layers=1))
    with pytest.raises(ValueError, match=r"110, outside the draft's vocabulary of 100"):
        draft.begin([5, 110], vocabulary=128)
    draft.begin([5, 6], vocabulary=128)
    assert len(proposed(draft, [5, 6, 7])) == 4
    draft.settle(0)
    assert proposed(draft, [5, 6, 7, 110]) == []
    draft.settle(0)
    assert proposed(draft, [5, 6, 7, 110, 8]) == []


def test_misuse_of_a_round_is_refused(make_llama):
    draft = ModelDraft(make_llama(layers=1))
    with pytest.raises(ValueError, match="begin"):
        proposed(draft, [5])
    draft.begin([5, 6], vocabulary=128)
    with pytest.raises(ValueError, match="longer text"):
        proposed(draft, [5, 6])
    proposed(draft, [5, 6, 7])
    with pytest.raises(ValueError, match="settle"):
        proposed(draft, [5, 6, 7, 8])
    with pytest.raises(ValueError, match="n=0"):
        NGramDraft(0)
