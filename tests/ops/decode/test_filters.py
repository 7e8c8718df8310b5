"""What the filters keep, against rankings written out plainly; and that the fast cut and the short ranking change nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.decode import filters
from assay.ops.decode.filters import AT_FIRST, Candidates, cut_by_comparing, cut_by_counting, min_p, remaining, top_k, top_p, typical_p
from assay.ops.decode.sampling import Sampling


def ids(found):
    return set(remaining(found)[0].nonzero().flatten().tolist())


def kept_plainly(p: list[float], k: int, mass: float, share: float) -> set[int]:
    """Top-k, then top-p of what it left, then min-p, one token after another."""
    ranked = sorted(range(len(p)), key=lambda token: (-p[token], token))[: k or None]
    total, before, kept = math.fsum(p[token] for token in ranked), 0.0, []
    for token in ranked:
        if mass < 1 and kept and before / total >= mass - 1e-6:
            break
        kept.append(token)
        before += p[token]
    return {token for token in kept if p[token] >= share * p[ranked[0]] and p[token] > 0}


# Sixteenths, so that ties are common and sums exact.
ROWS = st.lists(st.integers(0, 16), min_size=1, max_size=20).filter(any)


@given(
    row=ROWS, k=st.integers(0, 21), mass=st.sampled_from([0.01, 0.25, 0.5, 0.75, 0.99, 1.0]), share=st.sampled_from([0.0, 0.25, 0.5, 1.0])
)
def test_the_kept_set_is_that_of_a_ranking_written_out(row, k, mass, share):
    p = torch.tensor([row]) / 16
    assert ids(min_p(top_p(top_k(Candidates(p), k), mass), share)) == kept_plainly(p[0].tolist(), k, mass, share)


@given(rows=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12).filter(any), min_size=1, max_size=4), data=st.data())
def test_the_cut_by_comparing_equals_the_cut_by_counting(rows, data):
    p = torch.tensor(rows) / 4
    kept = torch.tensor(data.draw(st.lists(st.integers(1, 12), min_size=len(rows), max_size=len(rows))))
    last = p.sort(dim=-1, descending=True).values.gather(-1, kept.unsqueeze(-1) - 1)
    assert torch.equal(cut_by_comparing(p, last, kept), cut_by_counting(p, last, kept))


@pytest.mark.parametrize("flatness", [0.0, 1e-4, 0.01, 1.0])
@pytest.mark.parametrize(
    "chain",
    [[(top_p, 0.9)], [(min_p, 0.5)], [(top_k, 3000)], [(min_p, 0.9), (top_p, 0.9)], [(top_k, 2000), (top_p, 0.99)], [(typical_p, 0.8)]],
)
def test_what_the_first_thousand_ranks_do_not_hold_is_found_in_all_of_them(flatness, chain, monkeypatch):
    p = (flatness * torch.randn(2, 3 * AT_FIRST, generator=torch.Generator().manual_seed(0))).softmax(dim=-1)
    quick = Candidates(p)
    for step, parameter in chain:
        quick = step(quick, parameter)
    monkeypatch.setattr(filters, "AT_FIRST", 4 * AT_FIRST)
    whole = Candidates(p)
    assert whole.ranks(1).shape[-1] == p.shape[-1]
    for step, parameter in chain:
        whole = step(whole, parameter)
    assert torch.equal(remaining(quick), remaining(whole))
    assert (remaining(whole) > 0).sum() > AT_FIRST or flatness == 1


def test_typical_keeps_what_is_as_surprising_as_the_average_worked_by_hand():
    # H = 1.1422; the surprises .6931, 1.2040, 1.8971 and 2.9957 are .4491, .0618, .7549 and 1.8535 away from it.
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert ids(typical_p(Candidates(p), 0.2)) == {1}
    assert ids(typical_p(Candidates(p), 0.5)) == {0, 1}
    assert ids(typical_p(Candidates(p), 0.8)) == {0, 1}  # .3 + .5 is an exact hit
    assert ids(typical_p(Candidates(p), 0.81)) == {0, 1, 2}
    assert ids(typical_p(Candidates(p), 1.0)) == {0, 1, 2, 3}


def test_typical_may_drop_the_likeliest_token():
    p = torch.tensor([[0.4] + [0.06] * 10])  # H = 2.05: a surprise of 2.81 is nearer to it than one of .92
    assert ids(typical_p(Candidates(p), 0.5)) == set(range(1, 10))  # of ten equal ones the lower ids, nine of which reach .5


def test_typical_sees_what_earlier_filters_left_as_the_whole():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert ids(typical_p(top_k(Candidates(p), 1), 0.2)) == {0}


def test_a_token_without_probability_is_never_kept():
    p = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    for found in (top_k(Candidates(p), 3), top_p(Candidates(p), 0.999), typical_p(Candidates(p), 0.999), min_p(Candidates(p), 0.1)):
        assert ids(found) == {0, 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "asked",
    [
        {}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 50}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 0.7, "typical_p": 0.9},
        {"temperature": 1.5, "top_k": 2000, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.1,
         "presence_penalty": 0.2, "logit_bias": ((5, 2.0),)},
    ],
)  # fmt: skip
def test_a_gpu_keeps_what_a_cpu_keeps(asked):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).mul(3).round(decimals=1)  # tenths, so that ties are common
    for order in ("transformers", "vllm"):
        sampling = Sampling(**asked, order=order)
        ours = sampling.probabilities(logits, prompt=[5, 6, 6], emitted=[7, 7, 8])
        theirs = sampling.probabilities(logits.cuda(), prompt=[5, 6, 6], emitted=[7, 7, 8])
        assert theirs.is_cuda and torch.equal(ours > 0, theirs.cpu() > 0)
        assert torch.allclose(ours, theirs.cpu(), atol=1e-6)
