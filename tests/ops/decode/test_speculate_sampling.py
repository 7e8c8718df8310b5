"""The distribution of speculated texts, by counting thousands from a model whose every chance is known: sampling, overlaps, constraints."""

from collections import Counter
from itertools import pairwise, product

import pytest
import torch

from assay.ops.decode.acceptance import Adaptive
from assay.ops.decode.architecture import Architecture, Layer
from assay.ops.decode.cache import Cache
from assay.ops.decode.drafts import ModelDraft, NGramDraft
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.speculate import speculative_generate

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # checking each call would take longer than the draws


def seeds(*numbers):
    return [torch.Generator().manual_seed(number) for number in numbers]


class Markov:
    """A runner whose next token depends on the last one alone: cheap enough for thousands of texts, and its distribution is a product."""

    device, path = torch.device("cpu"), "table"
    shape = Architecture(
        family="llama", layers=(Layer(None, 0),), ropes=(), hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocabulary=4, norm_eps=1e-5,
        norm_offset=0.0, qk_norm=False, sandwich=False, activation="silu", attention_scale=1.0, embedding_scale=1.0, experts=0,
        experts_per_token=0, tied=False,
    )  # fmt: skip

    def __init__(self, seed: int):
        self.table = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))

    def cache(self, *, rows, capacity, format=None):
        return Cache(self.shape, rows=rows, capacity=capacity)

    def forward(self, cache, step):
        return self.table[step.ids[step.keep]]


def chi_squared(seen: Counter, chances: dict, draws: int) -> tuple[float, float]:
    """The statistic, and its limit at p = 0.001 by Wilson and Hilferty; cells that expect fewer than five are pooled."""
    often = [text for text in chances if chances[text] * draws >= 5]
    cells = [(seen[text], chances[text] * draws) for text in often]
    cells.append((draws - sum(seen[text] for text in often), draws * (1 - sum(chances[text] for text in often))))
    freedom = len(cells) - 1
    assert freedom > 20
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    return sum((found - mean) ** 2 / mean for found, mean in cells if mean), limit


def chances_of(step, first, length=4):
    """Exact chances of all texts of ``length`` tokens after ``first``, if ``step[a, b]`` is the chance of b after a."""
    texts = product(range(4), repeat=length)
    return {text: float(torch.stack([step[a, b] for a, b in pairwise((first, *text))]).prod()) for text in texts}


@pytest.mark.parametrize(
    ("draft_kind", "sampling", "gamma"),
    [
        ("model", Sampling(1.4, top_k=3, top_p=0.95), 2),
        ("ngram", Sampling(1.0), 2),
        ("model", Sampling(1.0), Adaptive(cost=0.05, most=2, weight=0.5)),
    ],
)
def test_sampled_texts_of_a_batch_have_the_exact_distribution_of_the_target(draft_kind, sampling, gamma):
    # One token of the prefill, then a round of two proposals: rejected at the first, at the second, or followed by a bonus token.
    target, rows, batches = Markov(0), 25, 48
    draft = ModelDraft(Markov(1)) if draft_kind == "model" else NGramDraft(1)
    prompts = [[0, 1, 3, 2, 0]] * rows  # the n-gram draft knows a follower of each token
    generators = seeds(*range(100, 100 + rows))
    seen, accepted = Counter(), Counter()
    for _ in range(batches):
        for result in speculative_generate(target, draft, prompts, max_new_tokens=4, gamma=gamma, sampling=sampling, generators=generators):
            seen[tuple(result.tokens)] += 1
            accepted[result.accepted[0]] += 1
    assert min(accepted[0], accepted[1], accepted[2]) > rows * batches / 20  # each outcome is frequent: a wrong rule would bend the counts
    found, limit = chi_squared(seen, chances_of(sampling.probabilities(target.table).double(), 0), rows * batches)
    assert found < limit


def test_the_overlap_recorded_at_a_place_is_the_chance_of_acceptance_there():
    target, draft, sampling = Markov(0), Markov(1), Sampling(1.2, top_p=0.9)
    p, q = sampling.probabilities(target.table), sampling.probabilities(draft.table)
    expected = p.minimum(q).sum(-1)
    taken = total = 0.0
    variance = 0.0
    for result in speculative_generate(
        target, ModelDraft(draft), [[0]] * 25, max_new_tokens=50, gamma=3, sampling=sampling, generators=seeds(*range(25))
    ):
        text, place = [0, *result.tokens], 1
        for accepted, proposed, overlaps in zip(result.accepted, result.proposed, result.overlaps, strict=True):
            assert len(overlaps) == min(accepted + 1, proposed)
            for offset, chance in enumerate(overlaps):
                assert chance == pytest.approx(float(expected[text[place + offset]]), abs=1e-6)
                taken += offset < accepted
                total += chance
                variance += chance * (1 - chance)
            place += accepted + 1
    assert abs(taken - total) < 4 * variance**0.5  # Σ min(p, q) and the share that was accepted are one number


def test_the_overlap_of_a_determined_proposal_is_its_chance():
    target, sampling = Markov(0), Sampling(1.0)
    p = sampling.probabilities(target.table)
    for result in speculative_generate(
        target, NGramDraft(1), [[0, 1, 3, 2, 0]] * 5, max_new_tokens=30, gamma=3, sampling=sampling, generators=seeds(*range(5))
    ):
        text, place = [0, *result.tokens], 1
        for accepted, overlaps in zip(result.accepted, result.overlaps, strict=True):
            for offset in range(accepted):
                assert overlaps[offset] == pytest.approx(float(p[text[place + offset], text[place + offset + 1]]))
            place += accepted + 1


def test_constrained_sampling_has_the_distribution_of_masked_sampling():
    class Words:  # of the four ids, 3 ends a text; the language is (01|10)*, cut off by the limit
        def __init__(self, text=()):
            self.text = list(text)

        finished = property(lambda self: self.text[-1:] == [3])

        def allowed(self):
            pending = len(self.text) % 2
            return torch.tensor([not (pending and self.text[-1] == 0), not (pending and self.text[-1] == 1), False, not pending])

        def advance(self, token):
            assert not self.finished and self.allowed()[token]
            self.text.append(token)

        def copy(self):
            return Words(self.text)

    target, draws, seen = Markov(0), 1000, Counter()
    draft, generators = ModelDraft(Markov(1)), seeds(*range(25))
    for _ in range(draws // 25):
        constraints = [Words() for _ in range(25)]
        for result in speculative_generate(
            target,
            draft,
            [[0]] * 25,
            max_new_tokens=6,
            gamma=3,
            sampling=Sampling(2.0),
            generators=generators,
            eos_ids={3},
            constraints=constraints,
        ):
            seen[tuple(result.tokens)] += 1

    def walk(text, chance):
        if len(text) == 6 or text[-1:] == (3,):
            yield text, chance
            return
        row = target.table[(0, *text)[-1]].masked_fill(~Words(text).allowed(), -torch.inf)
        for token, share in enumerate(Sampling(2.0).probabilities(row).tolist()):
            if share:
                yield from walk((*text, token), chance * share)

    chances = dict(walk((), 1.0))
    assert sum(chances.values()) == pytest.approx(1) and set(seen) <= set(chances)
    assert sum((seen[text] - draws * chance) ** 2 / (draws * chance) for text, chance in chances.items()) < 37.7  # 15 - 1 cells, p = 0.0006
