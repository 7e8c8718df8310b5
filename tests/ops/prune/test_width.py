"""Narrower models: what was zero can be removed, and nothing else can be lost on the way."""

import copy
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from assay.ops.models import structure
from assay.ops.models.checkpoint import load_model, save_checkpoint
from assay.ops.prune.width import Kept, cut

IDS = torch.arange(3, 43).unsqueeze(0)
FAMILIES = [
    "llama", "llama with scaled rope, tied", "llama with yarn, bias and one key head", "mistral with a window", "qwen2 with a bias", "qwen3",
    "gemma3", "mixtral with a window",
]  # fmt: skip
DENSE = FAMILIES[:-1]
GROUPED = [name for name in FAMILIES if "one key head" not in name]


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


@torch.no_grad()
def cached_logits(model, steps=12):
    cache = DynamicCache(config=model.config)
    found = [model(IDS[:, :-steps], cache=cache, use_cache=True).logits]
    found += [model(IDS[:, at : at + 1], cache=cache, use_cache=True).logits for at in range(IDS.shape[1] - steps, IDS.shape[1])]
    return torch.cat(found, dim=1)


def rows(heads, head_dim):
    return [head * head_dim + at for head in heads for at in range(head_dim)]


@torch.no_grad()
def zero_heads(model, removed):
    """Let the query heads ``removed[layer]`` have no effect."""
    for block, heads in zip(structure.blocks(model), removed, strict=True):
        block.self_attn.o_proj.weight[:, rows(heads, block.self_attn.head_dim)] = 0


@torch.no_grad()
def zero_groups(model, removed):
    """Zero the values and the outputs of key-value heads ``removed[layer]``."""
    for block, groups in zip(structure.blocks(model), removed, strict=True):
        attention = block.self_attn
        attention.v_proj.weight[rows(groups, attention.head_dim)] = 0
        if attention.v_proj.bias is not None:
            attention.v_proj.bias[rows(groups, attention.head_dim)] = 0
        each = attention.num_key_value_groups
        columns = rows([group * each + head for group in groups for head in range(each)], attention.head_dim)
        attention.o_proj.weight[:, columns] = 0


@torch.no_grad()
def zero_ffn(model, removed):
    for block, channels in zip(structure.blocks(model), removed, strict=True):
        block.mlp.down_proj.weight[:, channels] = 0


@torch.no_grad()
def zero_hidden(model, channels):
    """Let nothing ever write to these channels of the residual stream."""
    model.get_input_embeddings().weight[:, channels] = 0
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "mlp.down_proj.weight", "o_proj.bias")):
            parameter[channels] = 0
        elif name.endswith("experts.down_proj"):
            parameter[:, channels] = 0


def others(size, removed):
    return [index for index in range(size) if index not in removed]


def assert_reopens(model, directory, expected):
    save_checkpoint(model, None, directory)
    reopened = load_model(directory)
    torch.testing.assert_close(logits(reopened), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(cached_logits(reopened), expected, atol=1e-4, rtol=0)
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("name", GROUPED)
def test_removing_a_key_value_group_of_zero_values_changes_no_logit_and_the_rest_reopens(make_decoder, tmp_path, name):
    model = make_decoder(name)
    removed = [[0], [1], [1], [0]]
    zero_groups(model, removed)
    before, head_dim = logits(model), model.model.layers[0].self_attn.head_dim
    cut(model, Kept(kv_groups=[others(2, each) for each in removed]))
    after = logits(model)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    config = assert_reopens(model, tmp_path, after)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, head_dim)
    assert model.model.layers[1].self_attn.k_proj.weight.shape == (head_dim, 64)


@pytest.mark.parametrize("name", FAMILIES)
def test_removing_as_many_heads_of_each_group_keeps_the_others_with_their_keys(make_decoder, tmp_path, name):
    model = make_decoder(name)
    kept = [[0, 3], [1, 2], [0, 2], [3, 1]]
    zero_heads(model, [others(4, each) for each in kept])
    before, groups = logits(model), model.config.num_key_value_heads
    cut(model, Kept(query_heads=kept))
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)
    config = assert_reopens(model, tmp_path, logits(model))
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (2, groups)


@pytest.mark.parametrize("name", DENSE)
def test_removing_dead_ffn_channels_changes_no_logit(make_decoder, tmp_path, name):
    model = make_decoder(name)
    removed = [torch.randperm(96, generator=torch.Generator().manual_seed(layer))[:31].tolist() for layer in range(4)]
    zero_ffn(model, removed)
    before = logits(model)
    cut(model, Kept(ffn=[others(96, each) for each in removed]))
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)
    assert assert_reopens(model, tmp_path, logits(model))["intermediate_size"] == 65


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_removing_zero_channels_of_the_residual_stream_changes_no_logit_since_norms_are_corrected(make_decoder, tmp_path, name, tied):
    shared = {"rms_norm_eps": 1e-9} if name in ("qwen3", "gemma3") else {}  # what it shifts has a test of its own
    model = make_decoder(name, tie_word_embeddings=tied, **shared)
    removed = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:16].tolist()
    zero_hidden(model, removed)
    before = logits(model)
    cut(model, Kept(hidden=others(64, removed)))
    after = logits(model)
    torch.testing.assert_close(after, before, atol=1e-5 * float(before.abs().max()), rtol=0)
    assert assert_reopens(model, tmp_path, after)["hidden_size"] == 48
    assert structure.is_tied(model) == tied
    assert model.model.embed_tokens.weight.shape == (128, 48)


@pytest.mark.parametrize("tied", [True, False])
def test_uncorrected_norms_keep_their_gain_and_shift_the_logits(make_decoder, tied):
    for name in ("llama", "gemma3"):
        model = make_decoder(name, tie_word_embeddings=tied)
        zero_hidden(model, range(48, 64))
        before, gain = logits(model), model.model.layers[1].input_layernorm.weight[:48].clone()
        corrected = copy.deepcopy(model)
        cut(model, Kept(hidden=range(48)), correct_norms=False)
        cut(corrected, Kept(hidden=range(48)))
        assert model.model.layers[1].input_layernorm.weight.equal(gain)
        assert (logits(model) - before).abs().max() > 0.05
        one = float(name == "gemma3")  # multiplies by 1 + w
        torch.testing.assert_close(corrected.model.layers[1].input_layernorm.weight + one, (gain + one) * 1.1547005)  # √(64 / 48)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_epsilon_is_corrected_where_norms_of_heads_do_not_share_it_and_shifts_no_more_than_stated_where_they_do(make_decoder, name):
    model = make_decoder(name, rms_norm_eps=0.1, tie_word_embeddings=False)
    zero_hidden(model, range(48, 64))
    x = model.model.embed_tokens(IDS)
    before = model.model.layers[0].input_layernorm(x)[..., :48]
    cut(model, Kept(hidden=range(48)))
    share = (model.model.layers[0].input_layernorm(x[..., :48]) / before - 1).abs().amax(dim=-1)
    if name == "llama":
        assert model.config.rms_norm_eps == pytest.approx(0.1 * 64 / 48) and (share < 1e-6).all()
    else:
        bound = 0.1 * (64 / 48 - 1) / (2 * x[..., :48].square().mean(dim=-1))
        assert model.config.rms_norm_eps == 0.1 and (share > 1e-5).all() and (share <= bound + 1e-6).all()


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.sampled_from([0, 1]), min_size=4, max_size=4),
    st.integers(1, 2),
    st.integers(1, 128),
    st.sampled_from(range(4, 65, 2)),
    st.integers(0, 99),
)
def test_cutting_anything_at_once_equals_zeroing_it(make_llama, groups, each, ffn, hidden, seed):
    model = make_llama()
    random = torch.Generator().manual_seed(seed)

    def some(size, count):
        return torch.randperm(size, generator=random)[:count].tolist()

    kept = Kept(
        kv_groups=[[group] for group in groups], query_heads=[[2 * group + head for head in some(2, each)] for group in groups],
        ffn=[some(128, ffn) for _ in range(4)], hidden=some(64, hidden),
    )  # fmt: skip
    zero_groups(model, [[1 - group] for group in groups])
    zero_heads(model, [others(4, heads) for heads in kept.query_heads])
    zero_ffn(model, [others(128, channels) for channels in kept.ffn])
    zero_hidden(model, others(64, kept.hidden))
    before = logits(model)
    cut(model, kept)
    scale = float(before.abs().max())
    torch.testing.assert_close(logits(model), before, atol=2e-5 * scale, rtol=0)
    sizes = structure.shape_numbers(model)
    assert [sizes[key] for key in ("heads", "kv_heads", "head_dim", "intermediate_size", "hidden_size")] == [each, 1, 16, ffn, hidden]


def test_keeping_everything_changes_nothing(decoder):
    model = copy.deepcopy(decoder)
    cut(model, Kept(hidden=range(64), query_heads=[range(4)] * 4))
    torch.testing.assert_close(logits(model), logits(decoder), atol=1e-6, rtol=0)
    assert {name: tuple(each.shape) for name, each in model.state_dict().items()} == {
        name: tuple(each.shape) for name, each in decoder.state_dict().items()
    }


def test_a_cut_model_has_the_weights_of_its_shape_alone_and_stays_in_its_mode(tl8):
    generation = tl8.generation_config
    generation.max_new_tokens = 7
    cut(tl8, Kept(kv_groups=[[1]] * 4, ffn=[range(64)] * 4, hidden=range(32)))
    assert sum(each.numel() for each in tl8.parameters()) == 2 * 128 * 32 + 4 * (4 * 32 * 32 - 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32) + 32
    assert not tl8.training and tl8.generation_config.max_new_tokens == 7 and tl8.dtype == torch.float32
    assert math.prod(tl8.model.layers[0].self_attn.q_proj.weight.shape) == 32 * 32 and tl8.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (Kept(kv_groups=[[0]] * 3), r"kv_groups has lists of \[1, 1, 1\] numbers; 4 of one length, 1 to 2"),
        (Kept(kv_groups=[[0], [0, 1], [0], [0]]), r"kv_groups has lists of \[1, 2, 1, 1\]"),
        (Kept(kv_groups=[[]] * 4), "4 of one length, 1 to 2"),
        (Kept(ffn=[[0, 128]] * 4), r"ffn has \[128\]; each number is from 0 to 127 and given once"),
        (Kept(hidden=[3, 3, 4]), r"hidden has \[3\]"),
        (Kept(hidden=range(49)), r"cannot be reopened: The hidden size \(49\) is not a multiple of the number of attention heads \(4\)"),
        (Kept(query_heads=[[0, 1, 2]] * 4), r"query heads \[0, 1, 2\] of block 0 leave \[2, 1\] to its 2 groups.*as many in each"),
        (Kept(kv_groups=[[1]] * 4, query_heads=[[0]] * 4), r"leave \[1, 0\] to its 2 groups, of which \[1\] stay"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_the_model_left_as_it_was(tl8, kept, message):
    before = logits(tl8)
    with pytest.raises(ValueError, match=message):
        cut(tl8, kept)
    assert logits(tl8).equal(before)


def test_models_whose_parts_are_not_known_are_refused_by_name(make_decoder):
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    with pytest.raises(ValueError, match=r"qkv_proj\.weight \[128, 64\] of Phi3ForCausalLM is not known"):
        cut(Phi3ForCausalLM(Phi3Config(**sizes, pad_token_id=0)), Kept(ffn=[range(8)] * 2))
    with pytest.raises(ValueError, match=r"Starcoder2ForCausalLM is not known"):
        cut(Starcoder2ForCausalLM(Starcoder2Config(**sizes)), Kept(hidden=range(8)))
    with pytest.raises(ValueError, match=r"block 0 of MixtralForCausalLM is a mixture of experts.*whole experts can be dropped"):
        cut(make_decoder("mixtral with a window"), Kept(ffn=[range(8)] * 4))
    model = make_decoder("llama")
    model.config.model_type = "another"
    with pytest.raises(ValueError, match=r"hidden size of LlamaForCausalLM is not known.*model types llama"):
        cut(model, Kept(hidden=range(8)))
