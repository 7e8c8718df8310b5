"""The distribution that a token is drawn from, and the draw."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.decode.sampling import ORDERS, Sampling, probabilities, sample


def kept(probs, **filters) -> set[int]:
    result = probabilities(torch.tensor(probs).log(), temperature=1.0, **filters)
    return set(result.nonzero().flatten().tolist())


def test_top_p_of_one_keeps_all_of_4096_tokens_though_their_float32_sum_misses_one():
    # Comparing with a rounded cumulative sum, which ends at 1.0000001 or 0.9999994, would drop tokens or keep a single one.
    for seed in range(4):
        logits = torch.randn(4096, generator=torch.Generator().manual_seed(seed))
        assert (probabilities(logits, temperature=1.0, top_p=1.0) > 0).all()
        assert (probabilities(logits, temperature=1.0, top_p=1.5) > 0).all()


def test_the_token_that_crosses_top_p_stays():
    assert kept([0.5, 0.35, 0.1, 0.05], top_p=0.9) == {0, 1, 2}


def test_a_sum_that_hits_top_p_exactly_keeps_nothing_more():
    assert kept([0.3, 0.1, 0.1, 0.5], top_p=0.8) == {0, 3}


def test_an_exact_hit_in_decimals_is_one_whatever_the_rounding_of_the_sum():
    # Of these float32 sums about half end below the decimal and half above.
    for first in range(40, 60):
        for second in range(10, 30):
            rest = 94 - first - second
            if 6 < rest < second:
                assert kept([first / 100, second / 100, 0.06, rest / 100], top_p=(first + second) / 100) == {0, 1}


def test_of_equal_tokens_at_the_boundary_the_lower_ids_stay():
    assert kept([0.25, 0.25, 0.25, 0.25], top_p=0.5) == {0, 1}
    assert kept([0.1, 0.2, 0.2, 0.2, 0.3], top_k=3) == {1, 2, 4}


def test_a_tiny_top_p_keeps_the_likeliest_token():
    assert kept([0.2, 0.5, 0.3], top_p=1e-9) == {1}


def test_top_k_comes_before_top_p_which_sees_what_top_k_left_as_the_whole():
    # top_k leaves (.4, .3) = (.571, .429) of the whole; .571 reaches .5 alone, whereas .4 of the unfiltered distribution would not.
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.5) == {0}
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.5) == {0, 1}


def test_min_p_is_a_share_of_the_largest():
    assert kept([0.5, 0.26, 0.14, 0.1], min_p=0.5) == {0, 1}


def test_temperature_divides_the_logits():
    result = probabilities(torch.tensor([math.log(4.0), 0.0]), temperature=2.0)
    assert torch.allclose(result, torch.tensor([2 / 3, 1 / 3]))  # odds 4 become √4


def test_temperature_zero_is_the_largest_logit_and_the_lowest_id_among_equals():
    assert probabilities(torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, -1.0]]), temperature=0).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert probabilities(torch.tensor([1.0, 3.0, 3.0]), temperature=1.0, top_k=1).tolist() == [0, 1, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_a_temperature_close_to_zero_is_close_to_greedy_and_finite(temperature):
    assert probabilities(torch.tensor([1.0, 3.0, 2.0]), temperature=temperature).tolist() == [0, 1, 0]


def test_an_excluded_token_stays_excluded():
    assert probabilities(torch.tensor([0.0, -math.inf, 0.0]), temperature=1.0, top_p=0.99).tolist() == [0.5, 0, 0.5]


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    top_k=st.integers(0, 15),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_every_result_is_a_distribution_that_keeps_the_likeliest_token_and_at_most_top_k(logits, temperature, top_k, top_p, min_p):
    row = torch.tensor(logits)
    result = probabilities(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert result.dtype == torch.float32
    assert result.sum().item() == pytest.approx(1, abs=1e-5)
    unfiltered = probabilities(row, temperature=temperature)
    assert unfiltered[result.argmax()] == unfiltered.max()  # not the same id: close logits can have equal probabilities
    assert 0 < int((result > 0).sum()) <= (top_k or len(logits))


@given(seed=st.integers(0, 1000), top_k=st.integers(0, 9), top_p=st.sampled_from([0.5, 0.9, 1.0]))
def test_rows_of_a_batch_do_not_touch_each_other(seed, top_k, top_p):
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(seed))
    batch = probabilities(logits, temperature=0.7, top_k=top_k, top_p=top_p)
    assert torch.equal(batch[1, 2], probabilities(logits[1, 2], temperature=0.7, top_k=top_k, top_p=top_p))


@pytest.mark.parametrize("logits", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_without_a_distribution_are_refused(logits, temperature):
    with pytest.raises(ValueError, match="row of logits"):
        probabilities(torch.tensor(logits), temperature=temperature)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": math.nan}, {"min_p": 1.5}, {"min_p": -0.1},
        {"typical_p": 0.0}, {"repetition_penalty": 0.0}, {"repetition_penalty": math.inf}, {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf}, {"logit_bias": ((1, 2.0), (1, 3.0))}, {"logit_bias": ((1, math.nan),)}, {"order": "llama.cpp"},
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


# --- the order of the steps ------------------------------------------------------------------------------------------------------------------

PROMPT, EMITTED = [3, 9, 9, 27, 41], [9, 5, 5, 60]
ASKED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.6, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 7, 40]),
        "top_p": st.sampled_from([0.2, 0.7, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4]),
        "typical_p": st.sampled_from([0.5, 0.9, 1.0]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.5]),
        "logit_bias": st.sampled_from([(), ((9, -3.0), (11, 2.5))]),
    }
)


def normal_logits(seed: int) -> torch.Tensor:
    return 2 * torch.randn(64, generator=torch.Generator().manual_seed(seed))  # no ties: the peers keep all tokens of one at a boundary


@given(asked=ASKED, seed=st.integers(0, 50))
def test_the_order_transformers_is_that_of_its_own_processors(asked, seed, llama_processors):
    logits = normal_logits(seed)
    theirs = llama_processors(**asked)(torch.tensor([PROMPT + EMITTED]), logits[None].clone())[0].softmax(dim=-1)
    ours = Sampling(**asked).probabilities(logits, prompt=PROMPT, emitted=EMITTED)
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.fixture(scope="module")
def llama_processors(make_llama):
    """What transformers itself would apply before it draws, in its own order, of these parameters."""
    from transformers import GenerationConfig

    model = make_llama(layers=1)

    def processors(*, logit_bias, **asked):
        config = GenerationConfig(do_sample=True, **asked)
        config.sequence_bias = {(token,): value for token, value in logit_bias} or None
        return model._get_logits_processor(config, input_ids_seq_length=len(PROMPT))

    return processors


def as_vllm_does(logits, asked, presence, frequency):
    """One step after another on logits in float64, each filter by a mask, as vLLM's sampler describes itself."""
    x = logits.double().clone()
    for token, value in asked["logit_bias"]:
        x[token] += value
    for token in {*PROMPT, *EMITTED}:
        x[token] = x[token] / asked["repetition_penalty"] if x[token] > 0 else x[token] * asked["repetition_penalty"]
    for token in set(EMITTED):
        x[token] -= frequency * EMITTED.count(token) + presence
    x /= asked["temperature"]
    p = x.softmax(dim=-1)
    x[p < asked["min_p"] * p.max()] = -math.inf
    ascending, order = x.sort()
    if asked["top_k"]:
        ascending[ascending < ascending[-asked["top_k"]]] = -math.inf
    out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - asked["top_p"]
    out[-1] = False
    ascending[out] = -math.inf
    return torch.empty_like(x).scatter_(0, order, ascending).softmax(dim=-1)


@given(asked=ASKED, seed=st.integers(0, 50), presence=st.sampled_from([0.0, 0.7]), frequency=st.sampled_from([0.0, 0.3]))
def test_the_order_vllm_is_that_of_its_sampler(asked, seed, presence, frequency):
    asked = {**asked, "typical_p": 1.0}  # it has none
    logits = normal_logits(seed)
    ours = Sampling(**asked, presence_penalty=presence, frequency_penalty=frequency, order="vllm").probabilities(
        logits, prompt=PROMPT, emitted=EMITTED
    )
    theirs = as_vllm_does(logits, asked, presence, frequency)
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours.double(), theirs, atol=1e-6)


def test_the_presets_differ_where_min_p_stands():
    # min_p keeps the first two. Before top_p it makes them .571 and .429 of the whole, and .571 reaches .5; after, .4 did not.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    found = {order: Sampling(1.0, top_p=0.5, min_p=0.6, order=order).probabilities(logits) for order in ORDERS}
    assert found["vllm"].tolist() == [1, 0, 0, 0]
    assert found["transformers"].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_the_presets_have_the_same_steps_and_penalties_before_the_temperature():
    first, second = ORDERS.values()
    assert sorted(first) == sorted(second) and len(set(first)) == len(first)
    assert {"logit_bias", "temperature", "top_k", "top_p", "min_p", "typical_p"} < set(first)
    assert first[: first.index("temperature") + 1] == second[: second.index("temperature") + 1]


def test_logits_are_not_written_to():
    logits = normal_logits(0)
    before = logits.clone()
    for order in ORDERS:
        Sampling(0.7, 9, 0.9, 0.1, 0.9, 1.2, 0.1, 0.1, ((1, 2.0),), order=order).probabilities(logits, prompt=PROMPT, emitted=EMITTED)
    Sampling().draw(logits, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "asked", [Sampling(), Sampling(0.8), Sampling(0.8, 5, 0.9), Sampling(1.0, 1), Sampling(1.0, frequency_penalty=0.5)]
)
def test_a_draw_from_logits_is_a_draw_from_their_distribution(asked):
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for seed in range(8):
        logits = normal_logits(seed)
        found = asked.draw(logits, one, prompt=PROMPT, emitted=EMITTED)
        assert found == sample(asked.probabilities(logits, prompt=PROMPT, emitted=EMITTED), other)
    assert torch.equal(one.get_state(), other.get_state())


@pytest.mark.parametrize("asked", [Sampling(), Sampling(0.8, 5, 0.9, 0.01, 0.9, 1.2)])
def test_half_precision_logits_have_the_distribution_of_their_float32_values(asked):
    logits = normal_logits(1).bfloat16()
    found = asked.probabilities(logits, emitted=EMITTED)
    assert found.dtype == torch.float32 and torch.equal(found, asked.probabilities(logits.float(), emitted=EMITTED))


def test_a_seeded_request_draws_on_instead_of_repeating_its_first_draw():
    # A generator that is made anew at each step would give one token sixteen times.
    generator = torch.Generator().manual_seed(7)
    flat = probabilities(torch.zeros(128), temperature=1.0)
    assert len({sample(flat, generator) for _ in range(16)}) > 8


def test_a_request_beside_another_draws_what_it_draws_alone():
    flat = probabilities(torch.zeros(128), temperature=1.0)
    alone_generator = torch.Generator().manual_seed(7)
    alone = [sample(flat, alone_generator) for _ in range(16)]
    a, b = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    beside = []
    for _ in range(16):
        sample(flat, b)
        beside.append(sample(flat, a))
        torch.rand(3)  # and whatever else uses the shared generator
    assert beside == alone


def test_a_draw_leaves_the_shared_generator_alone_and_a_certain_token_needs_none():
    state = torch.get_rng_state()
    assert sample(torch.tensor([0.0, 1.0, 0.0]), None) == 1
    sample(torch.tensor([0.5, 0.5]), torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.499, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_a_token_without_probability_is_not_drawn_at_either_end_or_at_a_boundary(monkeypatch, u, token):
    monkeypatch.setattr("assay.ops.decode.sampling.uniforms", lambda count, generator: [u])
    assert sample(torch.tensor([0.0, 0.25, 0.0, 0.25, 0.0]), torch.Generator()) == token


def test_draws_come_at_the_frequency_of_their_probability():
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.6, 0.3, 0.1, 0.0])
    counts = torch.bincount(torch.tensor([sample(probs, generator) for _ in range(10_000)]), minlength=4)
    assert counts[3] == 0
    expected = probs[:3] * 10_000
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < 13.8  # χ² with 2 degrees of freedom, p = 0.001


def test_a_draw_without_a_generator_of_its_own_or_without_mass_is_refused():
    with pytest.raises(ValueError, match="generator"):
        sample(torch.tensor([0.5, 0.5]), None)
    with pytest.raises(ValueError, match="no mass"):
        sample(torch.zeros(3), torch.Generator())
