"""Sizes that meet a budget."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.prune.shapes import Family, Shape, parameters, retained, search

SMOLLM2 = Shape(layers=30, kv_groups=3, ffn=1536, hidden=576)
FAMILY = Family(vocab=49152, head_dim=64, heads_per_group=3, tied=True)


def test_parameters_of_known_models():
    assert parameters(SMOLLM2, FAMILY) == 134_515_008
    llama_2_7b = Family(vocab=32000, head_dim=128, heads_per_group=1, tied=False)
    assert parameters(Shape(32, 32, 11008, 4096), llama_2_7b) == 6_738_415_616


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("llama", {}), ("llama with scaled rope, tied", {}), ("llama with yarn, bias and one key head", {"qkv_bias": True, "o_bias": True}),
        ("mistral with a window", {}), ("qwen2 with a bias", {"qkv_bias": True}), ("qwen3", {"head_norms": True}),
        ("gemma3", {"norms": 4, "head_norms": True}),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_real_model(make_decoder, name, traits):
    for tied in (True, False):
        model = make_decoder(name, tie_word_embeddings=tied)
        config, attention = model.config, model.model.layers[0].self_attn
        groups = config.num_key_value_heads
        family = Family(128, attention.head_dim, config.num_attention_heads // groups, tied, **traits)
        shape = Shape(config.num_hidden_layers, groups, config.intermediate_size, config.hidden_size)
        assert parameters(shape, family) == sum(each.numel() for each in model.parameters())


def test_an_ffn_bias_counts_three_vectors(make_decoder):
    family = Family(128, 16, 2, True, ffn_bias=True)
    model = make_decoder("llama", mlp_bias=True, tie_word_embeddings=True)
    assert parameters(Shape(4, 2, 96, 64), family) == sum(each.numel() for each in model.parameters())


TINY, LITTLE = Shape(4, 2, 8, 8), Family(vocab=10, head_dim=2, heads_per_group=1, tied=True)
STEPS = Shape(1, 1, 4, 4)


def test_a_search_worked_by_hand():
    # A block has 8 k h + 3 f h + 2 h: 128 + 192 + 16 = 336 of the full model, which has 4 of them and 80 + 8 outside.
    assert parameters(TINY, LITTLE) == 1432
    limits = {"divisors": STEPS, "width_cut_pct": 50, "depth_cut_pct": 25}
    first, second, *_ = search(TINY, LITTLE, lambda _: 0, parameters_at_most=1096, **limits)
    assert first == (Shape(3, 2, 8, 8), 1432 - 336, 0)  # meets it exactly; of equal scores the one with more parameters
    assert second == (Shape(4, 2, 4, 8), 4 * 240 + 88, 0)
    (deepest,) = search(TINY, LITTLE, lambda shape: shape.layers, parameters_at_most=1096, best=1, **limits)
    assert deepest == (Shape(4, 2, 4, 8), 1048, 4)
    assert len(search(TINY, LITTLE, lambda _: 0, parameters_at_most=1432, best=99, **limits)) == 2 * 2 * 2 * 2


def test_no_more_than_the_percents_is_cut_and_by_default_40_and_20():
    # 60 % of 8 is 4.8, so 4 is too few; 80 % of 4 is 3.2, so 3 is too few.
    assert [each.shape for each in search(TINY, LITTLE, lambda _: 0, parameters_at_most=1432, divisors=STEPS)] == [TINY]
    shapes = [each.shape for each in search(SMOLLM2, FAMILY, lambda _: 0, parameters_at_most=134_515_008, best=999)]
    assert {shape.layers for shape in shapes} == set(range(24, 31)) and {shape.kv_groups for shape in shapes} == {2, 3}
    assert {shape.ffn for shape in shapes} == set(range(960, 1537, 64))
    # Of 384, 448, 512, 576 those that 6 and 9 heads divide; where that is not asked for, all.
    assert {(shape.kv_groups, shape.hidden) for shape in shapes} == {(2, 384), (2, 576), (3, 576)}
    free = search(SMOLLM2, FAMILY._replace(whole_heads=False), lambda _: 0, parameters_at_most=134_515_008, best=999)
    assert {each.shape.hidden for each in free} == {384, 448, 512, 576}
    odd = search(Shape(2, 1, 100, 50), LITTLE, lambda _: 0, parameters_at_most=10**9, divisors=Shape(1, 1, 32, 32), best=99)
    assert {(each.shape.ffn, each.shape.hidden) for each in odd} == {(64, 32), (64, 50), (96, 32), (96, 50), (100, 32), (100, 50)}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1500), st.integers(0, 99), st.integers(0, 99), st.integers(0, 5))
def test_what_is_found_meets_every_limit_and_nothing_that_does_is_better(budget, width, depth, seed):
    def score(shape):
        return (shape.layers * 7 + shape.ffn * 3 + shape.hidden * (seed + 1)) % 11

    every = [Shape(*sizes) for sizes in itertools.product(range(1, 5), (1, 2), (4, 8), (4, 8))]
    allowed = [
        shape for shape in every
        if parameters(shape, LITTLE) <= budget and shape.layers * 100 >= 4 * (100 - depth)
        and all(size * 100 >= whole * (100 - width) for size, whole in zip(shape[1:], TINY[1:], strict=True))
    ]  # fmt: skip
    limits = {"divisors": STEPS, "width_cut_pct": width, "depth_cut_pct": depth, "parameters_at_most": budget}
    if not allowed:
        with pytest.raises(ValueError, match=rf"no shape has at most {budget:,} parameters: the smallest .* has [\d,]+; raise"):
            search(TINY, LITTLE, score, **limits)
        return
    found = search(TINY, LITTLE, score, best=3, **limits)
    assert len(found) == min(3, len(allowed)) and {each.shape for each in found} <= set(allowed)
    assert [each.score for each in found] == sorted(map(score, allowed), reverse=True)[:3]


def test_a_shape_retains_the_product_of_the_shares_of_its_best_parts():
    score = retained([1, 3, 4, 2], [1, 1], [5, 1, 1, 1], [2, 2])
    assert score(Shape(4, 2, 4, 2)) == 1
    assert score(Shape(2, 1, 1, 2)) == pytest.approx(0.7 * 0.5 * 5 / 8 * 1)
    with pytest.raises(ValueError, match="importance of ffn is from 0 to 0; numbers of 0 or more, not all 0"):
        retained([1], [1], [0, 0], [1])


def test_a_search_that_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"leave 4,466,168 shapes .* take larger divisors"):
        search(Shape(30, 3, 1536, 576), FAMILY, lambda _: 0, parameters_at_most=10**9, divisors=Shape(1, 1, 1, 1), width_cut_pct=60)
    with pytest.raises(ValueError, match="depth_cut_pct=100 is not between 0 and 99"):
        search(TINY, LITTLE, lambda _: 0, parameters_at_most=10**9, depth_cut_pct=100)
