"""The two drafts alone: what they propose, and what stays of it."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.decode.drafts import ModelDraft, NGramDraft
from assay.ops.decode.generate import generate
from assay.ops.decode.request import Request
from assay.ops.decode.sampling import Sampling

GREEDY = Sampling()


def requests_of(*texts, seeds=(), limit=100):
    """A request for each text, all of it prompt."""
    return [
        Request(list(text), limit, generator=torch.Generator().manual_seed(seed))
        for text, seed in zip(texts, seeds or range(9), strict=False)
    ]


def proposed(draft, text, count=4):
    (proposal,) = draft.propose(requests_of(text), [count], sampling=GREEDY)
    return proposal.tokens


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


def ngram(*texts, n=3):
    draft = NGramDraft(n)
    draft.begin(requests_of(*texts), vocabulary=128)
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
    draft.begin(requests_of(text[:first]), vocabulary=128)
    for end in range(min(first, len(text)), len(text) + 1, step):
        assert proposed(draft, text[:end], count) == looked_up(text[:end], n, count)


def test_a_new_prompt_forgets_the_old_one():
    draft = ngram([1, 2, 3, 1, 2])
    draft.begin(requests_of([4, 1, 2]), vocabulary=128)
    assert proposed(draft, [4, 1, 2]) == []


def test_a_round_costs_no_more_in_a_long_text():
    def seconds(length):
        text = torch.randint(0, 50_000, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        draft, requests = ngram(text), requests_of(text)
        best = float("inf")
        for _ in range(200):
            requests[0].add(text[len(text) // 2])
            begun = time.perf_counter()
            draft.propose(requests, [4], sampling=GREEDY)
            best = min(best, time.perf_counter() - begun)
        return best

    assert seconds(200_000) < 20 * seconds(200)  # a scan would take 1000 times as long


def test_every_text_of_a_batch_has_an_index_of_its_own():
    draft = ngram([1, 2, 3, 1, 2], [1, 2, 9, 1, 2], [5, 6])
    requests = requests_of([1, 2, 3, 1, 2], [1, 2, 9, 1, 2], [5, 6])
    found = [proposal.tokens for proposal in draft.propose(requests, [1, 1, 1], sampling=GREEDY)]
    assert found == [[3], [9], []]
    assert [proposal.tokens for proposal in draft.propose(requests, [0, 2, 0], sampling=GREEDY)] == [[], [9, 1], []]


@pytest.fixture
def read_counts(make_llama, run):
    """A model, its draft, and how many tokens each row read in each forward."""

    def make(**config):
        model = make_llama(**{"layers": 2, "seed": 3, **config})
        runner, reads = run(model), []
        forward = runner.forward

        def recorded(cache, step):
            reads.append([step.rows.tolist().count(row) for row in range(cache.rows)])
            return forward(cache, step)

        runner.forward = recorded
        return model, ModelDraft(runner), reads

    return make


def test_a_model_draft_proposes_its_own_greedy_continuation_after_every_rollback(read_counts, run):
    model, draft, reads = read_counts()
    requests = requests_of([5, 17, 90, 3], [9, 60])
    draft.begin(requests, vocabulary=128)
    assert reads == [[4, 2]]
    for request in requests:
        request.add(11)
    unread = [1, 1]
    for accepted in ([4, 0], [0, 4], [2, 2], [1, 3], [3, 1], [4, 4], [4, 0], [0, 0]):
        reads.clear()
        proposals = draft.propose(requests, [4, 4], sampling=GREEDY)
        assert reads == [unread, [1, 1], [1, 1], [1, 1]]  # no token that could be kept was read again
        draft.settle(accepted)
        for row, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
            assert proposal.probabilities is None
            assert proposal.tokens == generate(run(model), [request.text], max_new_tokens=4)[0].tokens
            unread[row] = 2 if accepted[row] == 4 else 1  # the fourth proposal was drawn, never read
            for token in (*proposal.tokens[: accepted[row]], 100 + accepted[row]):
                request.add(token)


def test_texts_that_ask_for_less_or_nothing_are_read_no_further(read_counts, run):
    model, draft, reads = read_counts()
    requests = requests_of([5, 17, 90, 3], [9, 60], [8])
    draft.begin(requests, vocabulary=128)
    for request in requests:
        request.add(11)
    reads.clear()
    proposals = draft.propose(requests, [3, 0, 1], sampling=GREEDY)
    assert reads == [[1, 0, 1], [1, 0, 0], [1, 0, 0]]
    assert [len(proposal.tokens) for proposal in proposals] == [3, 0, 1]
    draft.settle([0, 0, 1])
    for request in requests:
        request.add(12)
    proposals = draft.propose(requests, [1, 2, 1], sampling=GREEDY)
    assert proposals[1].tokens == generate(run(model), [requests[1].text], max_new_tokens=2)[0].tokens


def test_nothing_is_proposed_behind_an_end_token(read_counts):
    _, draft, _ = read_counts()
    requests = requests_of([5, 17, 90, 3])
    draft.begin(requests, vocabulary=128)
    requests[0].add(11)
    (free,) = draft.propose(requests, [4], sampling=GREEDY)
    draft.settle([0])
    requests[0].text[-1:] = [11]
    requests[0].eos_ids = {free.tokens[1]}
    assert free.tokens[1] != free.tokens[0]
    requests[0].add(free.tokens[0])
    assert draft.propose(requests, [4], sampling=GREEDY)[0].tokens == free.tokens[1:2]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.5), Sampling(2.0, top_k=9), Sampling(2.0, top_p=0.8), Sampling(2.0, repetition_penalty=1.5)]
)
def test_a_model_draft_draws_from_the_distribution_that_it_reports_filters_included(read_counts, full_logits, sampling):
    model, draft, _ = read_counts()
    requests = requests_of([5, 17, 90, 3], [9, 60])
    draft.begin(requests, vocabulary=128)
    for request in requests:
        request.add(11)
    for accepted in ([3, 0], [0, 3], [2, 1], [1, 2]):
        for request, proposal in zip(requests, draft.propose(requests, [3, 3], sampling=sampling), strict=True):
            logits = full_logits(model, request.text + proposal.tokens)[len(request.text) - 1 : -1]
            said = sampling.probabilities(logits, prompt=request.text[: request.start], emitted=request.emitted + proposal.tokens[:-1])
            assert torch.allclose(proposal.probabilities, said, atol=1e-4)
            assert all(proposal.probabilities[row, token] > 0 for row, token in enumerate(proposal.tokens))
            taken = accepted[requests.index(request)]
            for token in (*proposal.tokens[:taken], 100 + taken):
                request.add(token)
        draft.settle(accepted)


def test_a_wider_draft_never_proposes_beyond_the_shared_vocabulary(read_counts):
    _, draft, _ = read_counts(vocab=160)
    requests = requests_of([5, 6])
    draft.begin(requests, vocabulary=128)
    requests[0].add(7)
    (proposal,) = draft.propose(requests, [30], sampling=Sampling(50.0))
    assert proposal.probabilities.shape == (30, 128)
    assert torch.allclose(proposal.probabilities.sum(-1), torch.ones(30))
    assert max(proposal.tokens) < 128


def test_a_narrower_draft_gives_the_ids_that_it_lacks_probability_zero(read_counts):
    _, draft, _ = read_counts(vocab=100)
    requests = requests_of([5, 6])
    draft.begin(requests, vocabulary=128)
    requests[0].add(7)
    (proposal,) = draft.propose(requests, [30], sampling=Sampling(50.0))
    assert proposal.probabilities.shape == (30, 128)
    assert not proposal.probabilities[:, 100:].any()


def test_a_narrower_draft_refuses_a_prompt_and_falls_silent_at_a_token_that_it_does_not_know(read_counts):
    _, draft, _ = read_counts(vocab=100)
    with pytest.raises(ValueError, match=r"prompt 1 has the id 110, outside the draft's vocabulary of 100"):
        draft.begin(requests_of([5], [5, 110]), vocabulary=128)
    with pytest.raises(ValueError, match="knows 100 ids and the tokenizer has 101"):
        draft.check(requests_of([5]), vocabulary=101)
    draft.check(requests_of([5]), vocabulary=100)
    requests = requests_of([5, 6], [5, 6])
    draft.begin(requests, vocabulary=128)
    requests[0].add(110)
    requests[1].add(7)
    for round in range(2):
        found = draft.propose(requests, [4, 4], sampling=GREEDY)
        assert [len(proposal.tokens) for proposal in found] == [0, 4]
        draft.settle([0, 0])
        for request in requests:
            request.add(8 + round)


def test_misuse_of_a_round_is_refused(read_counts):
    _, draft, _ = read_counts()
    requests = requests_of([5, 6])
    with pytest.raises(ValueError, match="begin"):
        draft.propose(requests, [4], sampling=GREEDY)
    draft.begin(requests, vocabulary=128)
    with pytest.raises(ValueError, match="longer text"):
        draft.propose(requests, [4], sampling=GREEDY)
    requests[0].add(7)
    draft.propose(requests, [4], sampling=GREEDY)
    requests[0].add(8)
    with pytest.raises(ValueError, match="settle"):
        draft.propose(requests, [4], sampling=GREEDY)
    with pytest.raises(ValueError, match="n=0"):
        NGramDraft(0)
