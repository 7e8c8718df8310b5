"""A model made anew from a config and the weights that are left."""

import copy

import pytest
import torch

from assay.ops.prune.rebuild import become, differing

IDS = torch.arange(3, 20).unsqueeze(0)


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


def test_a_model_becomes_another_with_all_that_its_modules_keep(make_llama):
    model, other = make_llama(), make_llama(hidden=32, ffn=48, layers=2, heads=2, kv_heads=1, tied=True, seed=1)
    model.generation_config.max_new_tokens = 7
    model.lm_head.weight = model.model.embed_tokens.weight  # tied in memory, as the other is
    become(model, copy.deepcopy(other.config), other.state_dict())
    assert logits(model).equal(logits(other))
    assert (model.lm_head.in_features, model.model.layers[0].self_attn.num_key_value_groups, len(model.model.layers)) == (32, 2, 2)
    assert model.generation_config.max_new_tokens == 7 and not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_that_do_not_fit_the_config_are_named_and_the_model_left_as_it_was(tl8):
    before, state = logits(tl8), dict(tl8.state_dict())
    del state["model.norm.weight"]
    state["lm_head.weight"] = state["lm_head.weight"][:, :60]
    assert differing(tl8.config, state) == ["lm_head.weight", "model.norm.weight"]
    with pytest.raises(ValueError, match=r"differing when rebuilt: lm_head\.weight, model\.norm\.weight"):
        become(tl8, tl8.config, state)
    assert logits(tl8).equal(before)


def test_a_head_that_is_tied_in_memory_and_not_in_the_config_is_refused_and_not_doubled(tl8):
    tl8.lm_head.weight = tl8.model.embed_tokens.weight
    before = logits(tl8)
    with pytest.raises(ValueError, match="the head of LlamaForCausalLM is its embedding in memory, and its config says that it is not"):
        become(tl8, tl8.config, tl8.state_dict())
    assert logits(tl8).equal(before)


def test_a_head_of_its_own_is_kept_though_the_config_says_that_it_is_tied(tl8):
    before, config = logits(tl8), copy.deepcopy(tl8.config)
    config.tie_word_embeddings = True
    become(tl8, config, tl8.state_dict())
    assert logits(tl8).equal(before)


def test_a_config_that_transformers_does_not_take_is_refused(tl8):
    config = copy.deepcopy(tl8.config)
    config.hidden_size = 50
    with pytest.raises(ValueError, match=r"cannot be reopened: The hidden size \(50\) is not a multiple"):
        differing(config, tl8.state_dict())
