"""Scoring and removing blocks."""

import math

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from assay.ops.models.checkpoint import load_model, save_checkpoint
from assay.ops.prune.depth import angular_distances, best_run, block_influence, drop_layers, lowest, random_layers

IDS = torch.arange(3, 43).unsqueeze(0)


@pytest.fixture
def windows():
    return torch.randint(3, 128, (6, 24), generator=torch.Generator().manual_seed(1))


def streams(model, windows):
    """The residual stream by another way: blocks called one after the other, [layers + 1, windows, length, hidden]."""
    body = model.model
    hidden = body.embed_tokens(windows)
    places = torch.arange(windows.shape[1]).unsqueeze(0)
    rotary = body.rotary_emb(hidden, places)
    causal = torch.full((windows.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    found = [hidden]
    for block in body.layers:
        out = block(found[-1], attention_mask=causal, position_ids=places, position_embeddings=rotary)
        found.append(out if isinstance(out, torch.Tensor) else out[0])
    return torch.stack(found).double()


def cached_logits(model, ids, steps=16, cache=None):
    """Prefill, then one token at a time; the logits of every position."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits = [model(ids[:, :-steps], cache=cache, use_cache=True).logits]
    for at in range(ids.shape[1] - steps, ids.shape[1]):
        logits.append(model(ids[:, at : at + 1], cache=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def test_block_influence_is_one_minus_the_mean_cosine_over_tokens_and_windows(tl8, windows):
    states = streams(tl8, windows)
    expected = (1 - torch.nn.functional.cosine_similarity(states[:-1], states[1:], dim=-1)).mean(dim=(1, 2))
    torch.testing.assert_close(block_influence(tl8, windows), expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_the_last_block_is_scored_before_the_final_norm(tl8, windows):
    """The last of transformers' hidden states has passed the norm, which makes the last block look more important."""
    hidden = tl8(windows, output_hidden_states=True).hidden_states
    after_norm = float((1 - torch.nn.functional.cosine_similarity(hidden[-2].double(), hidden[-1].double(), dim=-1)).mean())
    assert after_norm - float(block_influence(tl8, windows)[-1]) > 0.01


@torch.no_grad()
def test_angular_distance_is_taken_at_the_last_token_and_never_removes_the_last_block(tl8, windows):
    states = streams(tl8, windows)
    for n in (1, 2, 3):
        cosine = torch.nn.functional.cosine_similarity(states[: 4 - n, :, -1], states[n:4, :, -1], dim=-1)
        found = angular_distances(tl8, windows, n)
        assert found.shape == (4 - n,)  # the run l … l + n - 1 ends at block 2 at the latest
        torch.testing.assert_close(found, (cosine.arccos() / math.pi).mean(dim=1), atol=1e-6, rtol=0)
        everywhere = (torch.nn.functional.cosine_similarity(states[: 4 - n], states[n:4], dim=-1).arccos() / math.pi).mean(dim=(1, 2))
        torch.testing.assert_close(angular_distances(tl8, windows, n, tokens="all"), everywhere, atol=1e-6, rtol=0)
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"a run of {n} blocks does not fit a model of 4 .* 1 to 3 do"):
            angular_distances(tl8, windows, n)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_score(tl8, side):
    lengths = (12, 5)
    texts = [torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length)) for length in lengths]
    padded = torch.zeros(2, 12, dtype=torch.long)
    real = torch.zeros(2, 12, dtype=torch.bool)
    for row, text in enumerate(texts):
        place = slice(12 - text.shape[1], None) if side == "left" else slice(0, text.shape[1])
        padded[row, place], real[row, place] = text[0], True
    alone = [block_influence(tl8, text) for text in texts]
    expected = (12 * alone[0] + 5 * alone[1]) / 17
    torch.testing.assert_close(block_influence(tl8, padded, real=real), expected, atol=1e-5, rtol=0)
    angles = sum(angular_distances(tl8, text, 2) for text in texts) / 2
    torch.testing.assert_close(angular_distances(tl8, padded, 2, real=real), angles, atol=1e-5, rtol=0)


def test_a_block_that_does_nothing_has_no_influence_and_is_chosen(tl8, windows):
    with torch.no_grad():
        tl8.model.layers[2].self_attn.o_proj.weight.zero_()
        tl8.model.layers[2].mlp.down_proj.weight.zero_()
        before = tl8(IDS).logits
    scores = block_influence(tl8, windows)
    assert abs(float(scores[2])) < 1e-9 and lowest(scores, 1) == [2]
    assert best_run(angular_distances(tl8, windows, 1)) == 2
    drop_layers(tl8, [2])
    torch.testing.assert_close(tl8(IDS).logits, before, atol=1e-5, rtol=0)


def test_scores_do_not_depend_on_how_many_windows_run_at_once(tl8, windows, monkeypatch):
    whole = block_influence(tl8, windows)
    monkeypatch.setattr("assay.ops.prune.depth.BATCH", 1)
    torch.testing.assert_close(block_influence(tl8, windows), whole, atol=1e-7, rtol=0)


def test_lowest_and_best_run_worked_by_hand():
    assert lowest(torch.tensor([0.4, 0.1, 0.3, 0.1]), 3) == [1, 2, 3]
    assert lowest(torch.tensor([0.2, 0.1, 0.1, 0.1]), 2) == [1, 2]  # equal scores: the earlier first
    assert best_run(torch.tensor([0.3, 0.2, 0.2])) == 1
    for count in (0, 4, 5):
        with pytest.raises(ValueError, match=f"cannot remove {count} of 4 blocks; 1 to 3"):
            lowest(torch.tensor([0.4, 0.1, 0.3, 0.1]), count)


def test_random_layers_are_drawn_by_seed_each_equally_often():
    assert random_layers(8, 3, 5) == random_layers(8, 3, 5)
    drawn = [random_layers(4, 2, seed) for seed in range(600)]
    assert all(len(set(each)) == 2 and each == sorted(each) for each in drawn)
    counts = [sum(layer in each for each in drawn) for layer in range(4)]
    assert all(240 < count < 360 for count in counts)  # 300 expected, five standard deviations of 12
    with pytest.raises(ValueError, match="cannot remove 4 of 4 blocks; 1 to 3"):
        random_layers(4, 4, 0)


@torch.no_grad()
@pytest.mark.parametrize("removed", [[0], [1], [3], [0, 2]])
def test_a_pruned_model_decodes_from_its_cache_as_in_one_forward_and_reopens_whole(tl8, tmp_path, removed):
    """Without renumbering, block 1 in place of block 0 reads a cache slot that nobody counts; without the config, blocks return at random."""
    kept = [index for index in range(4) if index not in removed]
    weights = [tl8.model.layers[index].mlp.up_proj.weight.clone() for index in kept]
    drop_layers(tl8, removed)
    assert [block.self_attn.layer_idx for block in tl8.model.layers] == list(range(len(kept)))
    full = tl8(IDS).logits
    torch.testing.assert_close(cached_logits(tl8, IDS), full, atol=1e-4, rtol=0)
    save_checkpoint(tl8, None, tmp_path)
    reopened = load_model(tmp_path)
    assert reopened.config.num_hidden_layers == len(kept)
    assert all(torch.equal(block.mlp.up_proj.weight, weight) for block, weight in zip(reopened.model.layers, weights, strict=True))
    torch.testing.assert_close(reopened(IDS).logits, full, atol=1e-5, rtol=0)
    torch.testing.assert_close(cached_logits(reopened, IDS), full, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_pruned_model_that_is_not_renumbered_fails_the_cache_test(tl8):
    """The fault itself, to show that the test above would see it."""
    drop_layers(tl8, [0])
    for index, block in enumerate(tl8.model.layers):
        block.self_attn.layer_idx = index + 1
    lazy = DynamicCache()  # grows as layers ask for it: its first one stays empty, and its length reads 0
    assert (cached_logits(tl8, IDS, cache=lazy) - tl8(IDS, use_cache=False).logits).abs().max() > 1


@torch.no_grad()
def test_lists_of_one_entry_a_block_are_cut_in_the_config(tmp_path):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        sliding_window=6, layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    drop_layers(model, [1, 2])
    assert model.config.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    full = model(IDS).logits
    save_checkpoint(model, None, tmp_path)
    reopened = load_model(tmp_path)
    assert reopened.config.layer_types == model.config.layer_types
    torch.testing.assert_close(reopened(IDS).logits, full, atol=1e-5, rtol=0)
    torch.testing.assert_close(cached_logits(reopened, IDS), full, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_sliding_window_model_can_be_pruned(tmp_path):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
    )
    model = MistralForCausalLM(config).eval()
    drop_layers(model, [0])
    save_checkpoint(model, None, tmp_path)
    torch.testing.assert_close(cached_logits(load_model(tmp_path), IDS), model(IDS).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_blocks_named_by_number_in_the_config_are_renumbered_and_undescribable_ones_refused(tmp_path):
    def mixture(**kinds):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, **kinds,
            )
        ).eval()  # fmt: skip

    model = mixture(mlp_only_layers=[0, 2])
    drop_layers(model, [1])
    assert model.config.mlp_only_layers == [0, 1]
    save_checkpoint(model, None, tmp_path)
    torch.testing.assert_close(load_model(tmp_path)(IDS).logits, model(IDS).logits, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="its config cannot describe the blocks that are left"):
        drop_layers(mixture(decoder_sparse_step=2), [1])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([0, 1, 2, 3], "removing all 4 blocks leaves no model; at most 3"),
        ([4], r"blocks \[4\] of 4: each is a number from 0 to 3"),
        ([-1], "from 0 to 3"),
        ([1, 1], "given once"),
    ],
)
def test_blocks_that_cannot_be_removed_are_refused_and_the_model_left_as_it_was(tl8, layers, message):
    with pytest.raises(ValueError, match=message):
        drop_layers(tl8, layers)
    assert len(tl8.model.layers) == 4 and tl8.config.num_hidden_layers == 4


def test_windows_and_models_that_cannot_be_scored_are_refused(tl8, windows):
    with pytest.raises(ValueError, match=r"shape \[0, 24\]"):
        block_influence(tl8, windows[:0])
    with pytest.raises(ValueError, match="no real token"):
        block_influence(tl8, windows, real=torch.zeros_like(windows, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"training mode.*model\.eval"):
        block_influence(tl8.train(), windows)
    with torch.no_grad():
        tl8.eval().model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite hidden states"):
        block_influence(tl8, windows)
