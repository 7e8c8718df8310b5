"""How much heads and channels carry, and choosing them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.prune.width import Kept, cut
from assay.ops.prune.width_scores import choose, choose_in_groups, group_scores, groups_of, importance

OVER = {"mean": lambda x, dim: x.mean(dim), "l2": lambda x, dim: (x**2).sum(dim) ** 0.5, "max": lambda x, dim: x.amax(dim)}


@pytest.fixture
def windows():
    return torch.randint(3, 128, (6, 14), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def activations(model, windows):
    """By another way: sizes of heads and FFN channels [layers, windows, length, parts] and of norms [norms, windows, length, hidden]."""
    model.set_attn_implementation("eager")
    out = model(windows, output_hidden_states=True, output_attentions=True, use_cache=False)
    heads, ffn, norms = [], [], []
    for block, x, probabilities in zip(model.model.layers, out.hidden_states, out.attentions, strict=False):
        read = block.input_layernorm(x)
        values = block.self_attn.v_proj(read).unflatten(-1, (2, 16)).transpose(1, 2).repeat_interleave(2, dim=1)
        mixed = (probabilities @ values).transpose(1, 2)
        heads.append(mixed.norm(dim=-1))
        read_ffn = block.post_attention_layernorm(x + block.self_attn.o_proj(mixed.flatten(-2)))
        ffn.append((torch.nn.functional.silu(block.mlp.gate_proj(read_ffn)) * block.mlp.up_proj(read_ffn)).abs())
        norms += [read.abs(), read_ffn.abs()]
    norms.append(out.hidden_states[-1].abs())  # after the last norm
    model.set_attn_implementation("sdpa")
    return [torch.stack(each).double() for each in (heads, ffn, norms)]


@pytest.mark.parametrize(("tokens", "samples"), [("mean", "l2"), ("l2", "mean"), ("max", "max")])
def test_scores_are_those_of_activations_computed_by_another_way(tl8, windows, tokens, samples):
    found = importance(tl8, windows, tokens=tokens, samples=samples)
    heads, ffn, norms = (OVER[samples](OVER[tokens](each, 2), 1) for each in activations(tl8, windows))
    torch.testing.assert_close(found.heads, heads, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.ffn, ffn, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.hidden, norms.sum(dim=0), rtol=1e-4, atol=1e-5)


def test_the_default_is_the_mean_over_tokens_and_l2_over_windows(tl8, windows):
    one, two, both = (importance(tl8, each).heads for each in (windows[:1], windows[1:2], windows[:2]))
    torch.testing.assert_close(both, (one**2 + two**2).sqrt(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_the_number_of_windows_at_once_change_no_score(tl8, monkeypatch, side):
    texts = [torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length)) for length in (12, 5)]
    padded, real = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.bool)
    for row, text in enumerate(texts):
        place = slice(12 - text.shape[1], None) if side == "left" else slice(0, text.shape[1])
        padded[row, place], real[row, place] = text[0], True
    alone = [importance(tl8, text) for text in texts]
    together = importance(tl8, padded, real=real, samples="mean")
    monkeypatch.setattr("assay.ops.prune.width_scores.BATCH", 1)
    for name in ("heads", "ffn", "hidden"):
        expected = sum(getattr(each, name) for each in alone) / 2
        torch.testing.assert_close(getattr(together, name), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(getattr(importance(tl8, padded, real=real, samples="mean"), name), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_parts_that_carry_nothing_score_zero_and_are_removed_without_a_trace(tl8, windows):
    for layer, block in enumerate(tl8.model.layers):
        block.self_attn.v_proj.weight[16 * (layer % 2) : 16 * (layer % 2 + 1)] = 0
        block.mlp.up_proj.weight[layer::4] = 0
    before = tl8(windows, use_cache=False).logits
    found = importance(tl8, windows)
    groups = choose(group_scores(found.heads, 2), 1)
    assert groups == [[1], [0], [1], [0]]
    assert all((found.ffn[layer, layer::4] == 0).all() for layer in range(4)) and int((found.ffn == 0).sum()) == 4 * 32
    cut(tl8, Kept(kv_groups=groups, ffn=choose(found.ffn, 96, divisor=32)))
    torch.testing.assert_close(tl8(windows, use_cache=False).logits, before, atol=1e-4, rtol=0)


def test_each_family_has_scores_of_its_shape_and_experts_have_none_for_ffn(decoder, windows):
    found = importance(decoder, windows[:2])
    assert found.heads.shape == (4, 4) and found.hidden.shape == (64,) and (found.hidden > 0).all()
    mixture = hasattr(decoder.config, "num_local_experts")
    assert found.ffn is None if mixture else found.ffn.shape == (4, 96)


def test_choosing_worked_by_hand():
    scores = torch.tensor([[0.4, 0.1, 0.3, 0.1], [1.0, 1.0, 1.0, 1.0]])
    assert choose(scores, 2) == [[0, 2], [0, 1]]  # of equal ones the earlier, and never more than asked
    assert choose(scores, 2, protect={(0, 1), (1, 3)}) == [[0, 1], [0, 3]]
    assert group_scores(scores, 2).tolist() == [[pytest.approx(0.5), pytest.approx(0.4)], [2, 2]]
    # The best two of layer 0 lie in one group each; of layer 1 in one group, of which one has to go all the same.
    heads = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.9, 0.8, 0.1, 0.2]])
    assert choose_in_groups(heads, 2, 1) == [[0, 2], [0, 3]]
    assert choose_in_groups(heads, 2, 1, protect={(1, 1), (0, 3)}) == [[0, 3], [1, 3]]
    assert groups_of({(1, 1), (1, 0), (0, 3)}, 2) == {(1, 0), (0, 1)}


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 9))
def test_exactly_as_many_are_kept_none_of_them_beaten_by_one_that_goes(data, layers, parts):
    values = data.draw(st.lists(st.integers(0, 3), min_size=layers * parts, max_size=layers * parts))
    scores = torch.tensor(values, dtype=torch.float64).reshape(layers, parts)
    keep = data.draw(st.integers(1, parts))
    protect = {(layer, part) for layer in range(layers) for part in data.draw(st.sets(st.integers(0, parts - 1), max_size=keep))}
    for layer, kept in enumerate(choose(scores, keep, protect=protect)):
        assert len(set(kept)) == len(kept) == keep and kept == sorted(kept)
        assert {part for at, part in protect if at == layer} <= set(kept)
        free = [float(scores[layer, part]) for part in kept if (layer, part) not in protect]
        gone = [float(scores[layer, part]) for part in range(parts) if part not in kept]
        assert not free or not gone or min(free) >= max(gone)


def test_what_cannot_be_chosen_or_scored_is_refused(tl8, windows):
    scores = torch.ones(2, 8)
    for keep, divisor in ((0, 1), (9, 1), (6, 4)):
        with pytest.raises(ValueError, match=f"cannot keep {keep} of 8 in multiples of {divisor}; multiples up to 8"):
            choose(scores, keep, divisor=divisor)
    with pytest.raises(ValueError, match="3 are protected in layer 1, and 2 are kept"):
        choose(scores, 2, protect={(1, 0), (1, 3), (1, 5), (0, 0)})
    with pytest.raises(ValueError, match=r"\(2, 0\) is protected, but there are 2 layers of 8"):
        choose(scores, 2, protect={(2, 0)})
    with pytest.raises(ValueError, match="2 are protected in layer 1, and 1 are kept"):
        choose_in_groups(scores, 2, 1, protect={(1, 4), (1, 5), (1, 0)})
    with pytest.raises(ValueError, match=r"\(0, 8\) is protected, but there are 2 layers of 8 heads"):
        choose_in_groups(scores, 2, 1, protect={(0, 8)})
    with pytest.raises(ValueError, match=r"shape \[0, 14\]"):
        importance(tl8, windows[:0])
    with pytest.raises(ValueError, match=r"training mode.*model\.eval"):
        importance(tl8.train(), windows)
    with torch.no_grad():
        tl8.eval().model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"activations at model\.layers\.1\.mlp\.down_proj.* are NaN or infinite"):
        importance(tl8, windows)
