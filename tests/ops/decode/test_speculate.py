"""Speculative decoding against plain decoding and against forwards without a cache."""

from collections import Counter
from itertools import count, pairwise, product

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from assay.ops.decode.drafts import ModelDraft, NGramDraft, Proposal
from assay.ops.decode.generate import generate
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.speculate import speculative_generate

PROMPT = [5, 17, 90, 3, 44]
FORCED = [0, 1, 2, 3, 4, 0, 0, 4, 4, 1, 3, 2, 0]  # every number of acceptances, and rollbacks after rollbacks


def full_logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def assert_same_text(model, plain, speculated, *, gap=1e-4):
    """Identical, or at the first difference two logits tie: a forward of several positions rounds otherwise than several of one."""
    if speculated == plain:
        return
    at = next(index for index, (one, other) in enumerate(zip(plain, speculated, strict=False)) if one != other)
    logits = full_logits(model, PROMPT + plain[:at])[-1]
    assert abs(float(logits[plain[at]] - logits[speculated[at]])) < gap


@pytest.mark.parametrize("kind", ["llama", "mistral sdpa", "mistral eager"])
def test_after_any_number_of_acceptances_the_logits_are_those_of_a_full_forward(kind, tl8, make_mistral, scripted_draft, record_forwards):
    # A stale row, a wrong position, or a window that gives more columns than its mask shows as an error near 8.
    model = tl8 if kind == "llama" else make_mistral(attention=kind.split()[1])
    length = 1 + sum(FORCED) + len(FORCED)
    plain = generate(model, PROMPT, max_new_tokens=length + 8).tokens
    draft = scripted_draft(plain, [*FORCED, 4, 4])
    forwards = record_forwards(model)
    result = speculative_generate(model, draft, PROMPT, max_new_tokens=length + 8, gamma=4)
    seen = forwards[1:]  # behind the prefill
    assert result.accepted[: len(FORCED)] == FORCED == draft.settled[: len(FORCED)]
    assert result.tokens == plain
    expected = full_logits(model, PROMPT + plain)
    place = len(PROMPT)
    for accepted, (start, logits) in zip(result.accepted, seen, strict=True):
        assert start == place
        assert torch.allclose(logits[: accepted + 1], expected[place : place + accepted + 1], atol=1e-4)
        place += accepted + 1


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize(("gamma", "length"), [(1, 24), (4, 64), (7, 24)])
def test_greedy_speculation_gives_the_tokens_of_plain_decoding(make_llama, make_mistral, kind, gamma, length):
    make = make_llama if kind == "llama" else make_mistral
    target = make()
    plain = generate(target, PROMPT, max_new_tokens=length).tokens
    for draft in (NGramDraft(3), ModelDraft(make(layers=2)), ModelDraft(target)):
        result = speculative_generate(target, draft, PROMPT, max_new_tokens=length, gamma=gamma)
        assert len(result.tokens) == length
        assert_same_text(target, plain, result.tokens)


def test_a_draft_that_is_the_target_is_always_accepted_and_a_round_yields_gamma_plus_one(tl8):
    result = speculative_generate(tl8, ModelDraft(tl8), PROMPT, max_new_tokens=1 + 5 * 6, gamma=4)
    assert result.proposed == result.accepted == [4] * 6
    assert (len(result.tokens) - 1) / result.rounds == 5


def test_a_sampling_draft_that_is_the_target_is_always_accepted(tl8):
    generator = torch.Generator().manual_seed(5)
    result = speculative_generate(tl8, ModelDraft(tl8), PROMPT, max_new_tokens=31, gamma=4, temperature=2.0, top_p=0.9, generator=generator)
    # p and q differ by rounding alone, so at most a draw in ten thousand is rejected.
    assert result.accepted == result.proposed == [4] * 6


def test_an_n_gram_draft_saves_rounds_on_a_text_that_repeats(tl8):
    with torch.no_grad():
        tl8.lm_head.weight.copy_(torch.roll(tl8.model.embed_tokens.weight, 1, dims=0))  # the text counts upwards, whatever came before
        for layer in tl8.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    plain = generate(tl8, [*range(3, 12), 3], max_new_tokens=8).tokens
    result = speculative_generate(tl8, NGramDraft(3), [*range(3, 12), 3], max_new_tokens=8, gamma=4)
    assert result.tokens == plain == list(range(4, 12))
    assert result.rounds < 7


class Fixed:
    """Proposes given tokens in the first round and nothing later."""

    def __init__(self, tokens):
        self.tokens = tokens

    def check(self, prompt): ...

    def begin(self, prompt, *, vocabulary): ...

    def propose(self, tokens, count, *, sampling, generator):
        found, self.tokens = self.tokens[:count], []
        return Proposal(found, None)

    def settle(self, accepted): ...


def test_an_end_token_inside_an_accepted_block_ends_the_text_there(tl8):
    # Of a block [x, EOS, y, z] that is all accepted, nothing behind EOS may be emitted; looking at the last token alone would go on.
    free = generate(tl8, PROMPT, max_new_tokens=12).tokens
    end = free[2]
    assert end not in free[:2]
    plain = generate(tl8, PROMPT, max_new_tokens=12, eos_ids={end}).tokens
    result = speculative_generate(tl8, Fixed(free[1:5]), PROMPT, max_new_tokens=12, gamma=4, eos_ids={end})
    assert result.tokens == plain == free[:3]
    assert (result.proposed, result.accepted) == ([2], [2])


def test_an_end_token_stops_at_every_place_as_plain_decoding_does(tl8, scripted_draft):
    free = generate(tl8, PROMPT, max_new_tokens=20).tokens
    for end in free[:12]:
        for forced in ([4] * 20, [0, 2, 4, 1] * 5):
            plain = generate(tl8, PROMPT, max_new_tokens=20, eos_ids={end, 127}).tokens
            result = speculative_generate(tl8, scripted_draft(free, forced), PROMPT, max_new_tokens=20, gamma=4, eos_ids={end, 127})
            assert result.tokens == plain


def test_a_rejected_end_token_does_not_end_the_text(tl8):
    free = generate(tl8, PROMPT, max_new_tokens=8).tokens
    wrong = next(token for token in range(128) if token not in free)
    result = speculative_generate(tl8, Fixed([free[1], wrong, 5]), PROMPT, max_new_tokens=8, gamma=4, eos_ids={wrong})
    assert result.tokens == free


@pytest.mark.parametrize("limit", range(1, 13))
def test_the_limit_is_met_exactly_whatever_gamma_is(tl8, limit):
    for gamma in (1, 3, 20):
        result = speculative_generate(tl8, ModelDraft(tl8), PROMPT, max_new_tokens=limit, gamma=gamma)
        assert len(result.tokens) == limit
        # Each round yields its acceptances and one token.
        assert sum(result.accepted) + result.rounds == limit - 1


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8"])
def test_a_quantized_cache_holds_while_verifying_too(tl8, make_mistral, scripted_draft, record_forwards, kind, kv_format):
    # Rows are quantized each by itself, so a block stores what single tokens would; rounding may move a value to the next code now and then.
    model = tl8 if kind == "llama" else make_mistral()
    forwards = record_forwards(model)
    plain = generate(model, PROMPT, max_new_tokens=40, kv_format=kv_format).tokens
    one_by_one = torch.cat([logits for _, logits in forwards])
    unquantized = full_logits(model, PROMPT + plain)[len(PROMPT) - 1 : -1]
    assert (one_by_one - unquantized).abs().max() > 0.05  # the format is in force
    forwards.clear()
    result = speculative_generate(model, scripted_draft(plain, FORCED * 2), PROMPT, max_new_tokens=40, gamma=4, kv_format=kv_format)
    assert result.tokens == plain
    kept = [0, *result.accepted]
    in_blocks = torch.cat([logits[: accepted + 1] for accepted, (_, logits) in zip(kept, forwards, strict=True)])
    assert ((in_blocks - one_by_one).abs().amax(dim=-1) < 1e-3).float().mean() > 0.9
    for draft in (NGramDraft(3), ModelDraft(model, kv_format=kv_format)):
        assert speculative_generate(model, draft, PROMPT, max_new_tokens=40, gamma=4, kv_format=kv_format).tokens == plain


class Markov(torch.nn.Module):
    """A causal LM whose next token depends on the last one alone: cheap enough for thousands of texts, and its distribution is a product."""

    def __init__(self, seed: int):
        super().__init__()
        self.config = LlamaConfig(vocab_size=4, num_hidden_layers=1)
        self.table = torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        self.eval()

    device = torch.device("cpu")

    def forward(self, input_ids, cache, use_cache, logits_to_keep):
        return CausalLMOutputWithPast(logits=self.table[input_ids[:, -logits_to_keep:]])  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked_shapes")  # checking each call would take longer than the draws
@pytest.mark.parametrize(("draft_kind", "sampling"), [("model", Sampling(1.5, top_k=3)), ("ngram", Sampling(1.0))])
def test_sampled_texts_have_the_exact_distribution_of_the_target(draft_kind, sampling):
    # One token of the prefill, then a round of two proposals: rejected at the first, at the second, or followed by a bonus token.
    target = Markov(0)
    draft = ModelDraft(Markov(1)) if draft_kind == "model" else NGramDraft(1)
    prompt = [0, 1, 3, 2, 0]  # the n-gram draft knows a follower of each token
    generator = torch.Generator().manual_seed(11)
    draws, seen, accepted = 1500, Counter(), Counter()
    for _ in range(draws):
        result = speculative_generate(
            target, draft, prompt, max_new_tokens=4, gamma=2, temperature=sampling.temperature, top_k=sampling.top_k, generator=generator
        )
        seen[tuple(result.tokens)] += 1
        accepted[result.accepted[0]] += 1
    assert min(accepted[0], accepted[1], accepted[2]) > draws / 20  # each outcome is frequent, so that a wrong rule would bend the counts
    step = sampling.probabilities(target.table.detach()).double()
    texts = list(product(range(4), repeat=4))
    chances = {text: float(torch.stack([step[a, b] for a, b in pairwise((prompt[-1], *text))]).prod()) for text in texts}
    # Cells that expect fewer than five are pooled.
    often = [text for text in texts if chances[text] * draws >= 5]
    cells = [(seen[text], chances[text] * draws) for text in often]
    cells.append((draws - sum(seen[text] for text in often), draws * (1 - sum(chances[text] for text in often))))
    freedom = len(cells) - 1
    assert freedom > 20
    # Wilson and Hilferty's approximation of χ² at p = 0.001.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert sum((found - mean) ** 2 / mean for found, mean in cells) < limit


def test_a_wider_and_a_narrower_draft_leave_the_text_as_it_is(make_llama):
    target = make_llama()
    plain = generate(target, PROMPT, max_new_tokens=24).tokens
    for vocab in (96, 160):
        result = speculative_generate(target, ModelDraft(make_llama(vocab=vocab, layers=1)), PROMPT, max_new_tokens=24, gamma=3)
        assert_same_text(target, plain, result.tokens)
        sampled = speculative_generate(
            target, ModelDraft(make_llama(vocab=vocab, layers=1)), PROMPT, max_new_tokens=24, gamma=3, temperature=5.0,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        assert max(sampled.tokens) < 128


def test_ids_beyond_the_tokenizer_never_come_with_a_draft_either(make_llama):
    target = make_llama()
    with torch.no_grad():
        target.lm_head.weight[120:] *= 20
    result = speculative_generate(
        target, ModelDraft(make_llama(seed=1)), PROMPT, max_new_tokens=40, gamma=3, temperature=20.0, vocabulary=120,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert max(result.tokens) < 120


def test_one_draft_serves_one_text_after_another(tl8, make_llama):
    draft = ModelDraft(make_llama(layers=2, seed=0))
    for prompt in (PROMPT, [9, 9, 60], PROMPT):
        fresh = speculative_generate(tl8, ModelDraft(draft.model), prompt, max_new_tokens=16, gamma=3)
        again = speculative_generate(tl8, draft, prompt, max_new_tokens=16, gamma=3)
        assert (again.tokens, again.accepted) == (fresh.tokens, fresh.accepted)


def test_a_seed_gives_the_same_text_again_and_leaves_the_shared_generator_alone(tl8, make_llama):
    draft = ModelDraft(make_llama(layers=2))

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return speculative_generate(tl8, draft, PROMPT, max_new_tokens=16, gamma=3, temperature=3.0, generator=generator).tokens

    state = torch.get_rng_state()
    assert draw(1) == draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_clock_is_read_around_the_prefill_and_at_the_end(tl8):
    ticks = count(0, 10)
    result = speculative_generate(tl8, NGramDraft(3), PROMPT, max_new_tokens=8, gamma=3, clock=lambda: float(next(ticks)))
    assert (result.prefill_seconds, result.decode_seconds) == (10, 10)
    assert next(ticks) == 30


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gamma": 0}, "gamma=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompt_ids": [1, 128]}, "128, outside"),
        ({"temperature": 1.0}, "generator"),
        ({"prompt_ids": [1, 110]}, "110, outside the draft's vocabulary of 100"),
    ],
)
def test_a_request_that_cannot_work_is_refused_before_the_first_forward(tl8, make_llama, record_forwards, wrong, message):
    forwards = record_forwards(tl8)
    request = {"prompt_ids": PROMPT, "max_new_tokens": 4, "gamma": 2, **wrong}
    with pytest.raises(ValueError, match=message):
        speculative_generate(tl8, ModelDraft(make_llama(vocab=100, layers=1)), request.pop("prompt_ids"), **request)
    assert not forwards


def test_a_model_whose_state_cannot_be_rolled_back_is_refused_before_the_first_forward(record_forwards):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    model = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        )
    ).eval()  # fmt: skip
    forwards = record_forwards(model)
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM keeps its past in LinearAttentionLayer"):
        speculative_generate(model, NGramDraft(2), [1, 2, 3], max_new_tokens=4, gamma=2)
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM keeps its past in LinearAttentionLayer"):
        ModelDraft(model).check([1, 2])
    assert not forwards


@pytest.mark.parametrize(("tokens", "message"), [([1, 2, 3], "at most 2"), ([1, 128], "128, outside")])
def test_a_draft_that_breaks_its_contract_is_named(tl8, tokens, message):
    class Bad(Fixed):
        def propose(self, text, count, *, sampling, generator):
            return Proposal(tokens, None)

    with pytest.raises(ValueError, match=message):
        speculative_generate(tl8, Bad([]), PROMPT, max_new_tokens=8, gamma=2)
