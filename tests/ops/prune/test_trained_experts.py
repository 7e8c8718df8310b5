"""Experts of a router that was trained: those that do least cost least to lose. A tiny Mixtral, trained here on a text of four domains."""

import copy
import math

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from assay.ops.prune.experts import drop_experts, merge_experts, usage
from assay.ops.prune.width_scores import choose
from assay.ops.train.loop import Settings
from assay.ops.train.scratch import learn

EXPERTS, TOP, DOMAINS, IDS, LENGTH = 8, 2, 4, 24, 24
VOCABULARY = DOMAINS * IDS


def text(windows, seed, domain=None):
    """Windows [windows, length] of one domain each: its own ids, of which each is followed by one, but for one time in ten."""
    random = torch.Generator().manual_seed(seed)
    follows = torch.stack([torch.randperm(IDS, generator=torch.Generator().manual_seed(90 + each)) for each in range(DOMAINS)])
    of = torch.randint(0, DOMAINS, (windows,), generator=random) if domain is None else torch.full((windows,), domain)
    ids, now = [], torch.randint(0, IDS, (windows,), generator=random)
    for _ in range(LENGTH):
        ids.append(of * IDS + now)
        other = torch.randint(0, IDS, (windows,), generator=random)
        now = torch.where(torch.rand(windows, generator=random) < 0.1, other, follows[of, now])
    return torch.stack(ids, dim=1)


@torch.no_grad()
def loss(model, ids):
    """Nats a token."""
    return float(model(ids, labels=ids, use_cache=False).loss)


@pytest.fixture(scope="session")
def trained():
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            num_local_experts=EXPERTS, num_experts_per_tok=TOP, max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        )
    )  # fmt: skip
    asked = Settings(steps=120, learning_rate=1e-2, record_every=120, evaluate_every=120)
    learn(model, text(32 * 120, 0), text(8, 1), settings=asked, rows=32)
    return model.eval()


@pytest.fixture(scope="session")
def used(trained):
    return usage(trained, text(64, 2), outputs=True)


@pytest.fixture(scope="session")
def cost(trained):
    """``cost(kept)``: by how much the loss on held-out text rises when these experts alone are kept."""
    held_out = text(64, 3)
    before = loss(trained, held_out)

    def of(kept, how=drop_experts, *more):
        model = copy.deepcopy(trained)
        how(model, kept, *more)
        return loss(model, held_out) - before

    return of


def test_the_router_has_learned_to_tell_the_domains(trained, used):
    assert loss(trained, text(64, 3)) < 0.3 * math.log(VOCABULARY)
    assert used.tokens.sum(dim=1).tolist() == [64 * LENGTH * TOP] * 2  # each token goes to as many as the config says
    shares = torch.stack([usage(trained, text(16, 4, domain)).tokens / (16 * LENGTH * TOP) for domain in range(DOMAINS)])
    apart = [
        [0.5 * (one - other).abs().sum(dim=-1).max().item() for other in shares] for one in shares
    ]  # total variation, in the mixture where it is most
    assert all(apart[one][other] > 0.3 for one in range(DOMAINS) for other in range(one))


@pytest.mark.parametrize("experts", [6, 4])
def test_experts_that_do_least_cost_least_to_lose(experts, used, cost):
    random = torch.Generator().manual_seed(0)
    drawn = [cost([torch.randperm(EXPERTS, generator=random)[:experts].tolist() for _ in range(2)]) for _ in range(12)]
    most_used = cost(choose(-used.tokens, experts))
    for score in (used.tokens, used.saliency):
        assert 0 < cost(choose(score, experts)) < 0.95 * sum(drawn) / len(drawn) < most_used


@pytest.mark.parametrize("score", ["tokens", "saliency"])
def test_merged_into_the_nearest_the_text_is_still_known(score, used, cost):
    for experts in (6, 4):
        assert 0 < cost(choose(getattr(used, score), experts), merge_experts, used) < 0.5 * math.log(VOCABULARY)


def test_as_many_are_left_as_a_token_is_sent_to(trained, used, cost):
    assert math.isfinite(cost(choose(used.tokens, TOP)))
    model = copy.deepcopy(trained)
    drop_experts(model, choose(used.tokens, TOP))
    assert usage(model, text(4, 5)).tokens.tolist() == [[4 * LENGTH] * TOP] * 2
    with pytest.raises(ValueError, match=r"2 lists of one length were expected, 2 to 8, since a token is sent to 2"):
        drop_experts(trained, choose(used.tokens, TOP - 1))
