"""What heads do, on a model whose heads were built by hand to do it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.ops.evaluate.heads import (
    heads_at_least,
    induction_scores,
    needle_prompt,
    random_sequences,
    retrieval_scores,
    sink_scores,
    watched_attention,
)

TOKENS, HEAD = 32, 128  # ids, of which 0 comes first in a text; head size
SINK, PREVIOUS, INDUCTION, IDLE = (0, 0), (0, 1), (1, 0), (1, 1)


@pytest.fixture(scope="module")
def built():
    """Two layers of two heads: (0, 0) looks at token 0, (0, 1) at the token before, (1, 0) at the token after an earlier occurrence, (1, 1) at everything.

    The residual stream holds the token (one of 32 channels), a constant, and in 32 more channels the token before, which (0, 1) writes. Rotary pairs of a
    head turn by θ^(-i/64) a token: the last 32 hardly at all, so that tokens are compared there whatever their places; the first ones tell places apart.
    """
    hidden = 2 * TOKENS + 2  # transformers wants a multiple of the heads
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=hidden, intermediate_size=4, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=HEAD, rope_parameters={"rope_type": "default", "rope_theta": 1e12}, tie_word_embeddings=False,
        )
    )  # fmt: skip
    still = torch.arange(HEAD // 4, HEAD // 2)  # the first halves of the pairs that hardly turn
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_() if parameter.ndim > 1 else parameter.fill_(1)
        model.model.embed_tokens.weight[:, :TOKENS] = torch.eye(TOKENS)
        model.model.embed_tokens.weight[:, 2 * TOKENS] = 1
        first, second = (block.self_attn for block in model.model.layers)
        constant, sharp = 2 * TOKENS, 20.0
        # (0, 0): every query is the same, and only token 0 has a key.
        first.q_proj.weight[still[0], constant] = sharp
        first.k_proj.weight[still[0], 0] = sharp
        # (0, 1): keys are all the same and queries are that key turned back by one place.
        turns = 1e12 ** (-2 * torch.arange(8) / HEAD)
        first.k_proj.weight[HEAD : HEAD + 8, constant] = sharp
        first.q_proj.weight[HEAD : HEAD + 8, constant] = sharp * turns.cos()
        first.q_proj.weight[HEAD + HEAD // 2 : HEAD + HEAD // 2 + 8, constant] = -sharp * turns.sin()
        first.v_proj.weight[HEAD : HEAD + TOKENS, :TOKENS] = torch.eye(TOKENS)
        first.o_proj.weight[TOKENS : 2 * TOKENS, HEAD : HEAD + TOKENS] = torch.eye(TOKENS)
        # (1, 0): the query is the token, the key is the token before.
        second.q_proj.weight[still, :TOKENS] = sharp * torch.eye(TOKENS)
        second.k_proj.weight[still, TOKENS : 2 * TOKENS] = sharp * torch.eye(TOKENS)
    return model.eval()


def only(scores, head, least):
    """Whether ``head`` reaches ``least`` and no other comes near."""
    others = scores.clone()
    others[head] = 0
    return float(scores[head]) > least and float(others.max()) < least / 2


def test_induction_is_found_in_the_head_that_was_built_for_it_and_in_no_other(built):
    sequences = random_sequences(TOKENS, sequences=3, length=16, seed=0, without=[0])
    assert only(induction_scores(built, sequences, first=0), INDUCTION, 0.95)
    assert only(induction_scores(built, sequences), INDUCTION, 0.9)


def test_the_sink_is_the_head_that_looks_at_the_first_token(built):
    windows = torch.cat([torch.zeros(4, 1, dtype=torch.long), random_sequences(TOKENS, sequences=4, length=20, seed=1, without=[0])], dim=1)
    scores = sink_scores(built, windows)
    assert float(scores[SINK]) > 0.99
    # (1, 1) looks everywhere alike: 1 / (t + 1) at position t, from 1 to 20.
    assert float(scores[IDLE]) == pytest.approx(sum(1 / (t + 1) for t in range(1, 21)) / 20, abs=1e-5)
    assert float(scores[PREVIOUS]) == pytest.approx(1 / 20, abs=0.02)  # position 1 alone
    assert heads_at_least(scores, 0.9) == {SINK}


def test_retrieval_is_the_head_that_looks_at_what_is_copied(built):
    hay = torch.tensor([0, *[1, 2, 3, 4, 5, 6] * 4])
    needle, question = torch.tensor([20, 21, 22, 23]), torch.tensor([7, 20])
    prompts = [needle_prompt(hay, needle, question, needle[1:], depth_pct=depth) for depth in (10, 50, 100)]
    assert [(prompt.start, prompt.stop, prompt.answer, len(prompt.ids)) for prompt in prompts] == [
        (2, 6, 31, 34), (12, 16, 31, 34), (25, 29, 31, 34)]  # fmt: skip
    scores = retrieval_scores(built, prompts)
    assert only(scores, INDUCTION, 0.99)
    # The same answer beside a needle of the same tokens in another order: the head looks at the token after, which is another.
    shuffled = needle_prompt(hay, torch.tensor([20, 23, 22, 21]), question, needle[1:], depth_pct=50)
    assert float(retrieval_scores(built, [shuffled])[INDUCTION]) == 0


def test_a_token_outside_the_needle_is_not_retrieved(built):
    hay = torch.tensor([0, 1, 20, 21, 22, 23, 2])
    prompt = needle_prompt(hay, torch.tensor([30, 21, 22, 23]), torch.tensor([7, 20]), torch.tensor([21]), depth_pct=100)
    assert float(retrieval_scores(built, [prompt])[INDUCTION]) == 0


def test_scores_of_several_texts_are_the_mean_of_each(tl8):
    windows = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(0))
    alone = torch.stack([sink_scores(tl8, window[None]) for window in windows])
    torch.testing.assert_close(sink_scores(tl8, windows), alone.mean(dim=0))
    hay = torch.arange(3, 60)
    prompts = [needle_prompt(hay, torch.tensor([90, 91]), torch.tensor([80]), torch.tensor([91, 90]), depth_pct=depth) for depth in (0, 40)]
    alone = torch.stack([retrieval_scores(tl8, [prompt]) for prompt in prompts])
    torch.testing.assert_close(retrieval_scores(tl8, prompts), alone.mean(dim=0))
    assert set(alone.flatten().tolist()) <= {0.0, 0.5, 1.0}  # of two tokens


def test_attention_is_causal_sums_to_one_and_is_that_of_queries_and_keys(decoder):
    """And the model attends afterwards as it did before."""
    ids = torch.randint(3, 128, (1, 14), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = decoder(ids, use_cache=False).logits
        found = {}
        with watched_attention(decoder, found.__setitem__):
            watched = decoder(ids, use_cache=False).logits
        after = decoder(ids, use_cache=False).logits
    assert list(found) == [0, 1, 2, 3] and decoder.config._attn_implementation == "sdpa"
    assert after.equal(before)
    torch.testing.assert_close(watched, before, atol=1e-4, rtol=0)
    window = 6 if decoder.config.to_dict().get("sliding_window") else 14
    for attention in found.values():
        assert attention.shape == (1, 4, 14, 14)
        torch.testing.assert_close(attention.sum(dim=-1), torch.ones(1, 4, 14))
        assert not attention.triu(1).any()
    assert window == 14 or any(not attention.tril(-window).any() for attention in found.values())


@torch.no_grad()
def test_attention_worked_out_from_queries_and_keys(tl8):
    ids = torch.arange(3, 15)[None]
    found = {}
    with watched_attention(tl8, found.__setitem__):
        tl8(ids, use_cache=False)
    block, attention = tl8.model.layers[0], tl8.model.layers[0].self_attn
    read = block.input_layernorm(tl8.model.embed_tokens(ids))
    cos, sin = tl8.model.rotary_emb(read, torch.arange(12)[None])

    def turned(x):
        return x * cos + torch.cat([-x[..., 8:], x[..., :8]], dim=-1) * sin

    queries = turned(attention.q_proj(read).unflatten(-1, (4, 16)).transpose(1, 2))
    keys = turned(attention.k_proj(read).unflatten(-1, (2, 16)).transpose(1, 2)).repeat_interleave(2, dim=1)
    logits = (queries @ keys.mT / 4).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found[0], logits.softmax(dim=-1), atol=1e-5, rtol=0)


def test_random_sequences_are_drawn_by_seed_without_repetition():
    drawn = random_sequences(40, sequences=50, length=30, seed=3, without=[0, 1, 2])
    assert drawn.equal(random_sequences(40, sequences=50, length=30, seed=3, without=[0, 1, 2]))
    assert all(len(set(each)) == 30 for each in drawn.tolist()) and set(drawn.flatten().tolist()) == set(range(3, 40))
    with pytest.raises(ValueError, match="a sequence of 38 different tokens cannot be drawn from 37; 1 to 37 can"):
        random_sequences(40, sequences=1, length=38, seed=3, without=[0, 1, 2])


def test_what_cannot_be_scored_is_refused(tl8):
    hay, needle, question = torch.arange(3, 20), torch.tensor([90, 91]), torch.tensor([80])
    with pytest.raises(ValueError, match=r"the answer has 2 tokens, of which \[92\] are not in the needle"):
        needle_prompt(hay, needle, question, torch.tensor([91, 92]), depth_pct=5)
    with pytest.raises(ValueError, match="the answer has 0 tokens"):
        needle_prompt(hay, needle, question, needle[:0], depth_pct=5)
    with pytest.raises(ValueError, match="depth_pct=101 is not between 0 and 100"):
        needle_prompt(hay, needle, question, needle, depth_pct=101)
    with pytest.raises(ValueError, match="no text was given"):
        retrieval_scores(tl8, [])
    with pytest.raises(ValueError, match=r"shape \[2, 1\]; two tokens or more"):
        sink_scores(tl8, torch.ones(2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"training mode.*model\.eval"):
        sink_scores(tl8.train(), torch.ones(1, 4, dtype=torch.long))
