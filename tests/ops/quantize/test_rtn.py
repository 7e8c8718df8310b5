"""Which weights a pass rounds."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from assay.ops.quantize.grid import Format, dequantize, quantize
from assay.ops.quantize.rtn import rtn


def test_every_linear_of_the_blocks_is_rounded_and_nothing_else(tl8):
    before = {name: tensor.clone() for name, tensor in tl8.state_dict().items()}
    found = rtn(tl8, Format("int", 4, 32, symmetric=True))
    for name, tensor in tl8.state_dict().items():
        layer = name.removesuffix(".weight")
        if name.startswith("model.layers.") and name.endswith("proj.weight"):
            expected = dequantize(quantize(before[name], Format("int", 4, 32, symmetric=True)))
            assert torch.equal(tensor, expected) and torch.equal(dequantize(found.layers[layer]), expected)
        else:
            assert torch.equal(tensor, before[name]) and layer not in found.layers
    assert found.summary["quantized_layers"] == 28 and found.summary["coverage"] == 1.0
    assert found.summary["skipped"] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert 0.003 < found.summary["relative_error"] < 0.03


def test_rounding_a_tied_head_in_place_would_change_the_embedding_and_is_refused(make_llama):
    """One storage, two names: a pass over linear layers that takes the head along rounds the embedding unseen."""
    for embeddings, head in (("skip", "quantize"), ("quantize", "skip")):
        model = make_llama(tied=True)
        before = model.model.embed_tokens.weight.clone()
        with pytest.raises(ValueError, match=r"lm_head and model\.embed_tokens are one tensor.*head: untie, which quantizes a copy"):
            rtn(model, Format("int", 4, 32, symmetric=True), embeddings=embeddings, head=head)
        assert torch.equal(model.model.embed_tokens.weight, before)


def test_a_tied_head_is_skipped_rounded_as_one_or_untied_as_asked(make_llama):
    skipped = make_llama(tied=True)
    before = skipped.lm_head.weight.clone()
    assert "lm_head" not in rtn(skipped, Format("int", 4, 32, symmetric=True)).layers
    assert torch.equal(skipped.lm_head.weight, before)

    both = make_llama(tied=True)
    found = rtn(both, Format("int", 4, 32, symmetric=True), embeddings="quantize", head="quantize")
    assert "model.embed_tokens" in found.layers and "lm_head" not in found.layers  # one tensor, rounded and counted once
    assert both.lm_head.weight is both.model.embed_tokens.weight and not torch.equal(both.lm_head.weight, before)

    untied = make_llama(tied=True)
    found = rtn(untied, Format("int", 4, 32, symmetric=True), head="untie")
    assert "lm_head" in found.layers and not untied.config.tie_word_embeddings
    assert torch.equal(untied.model.embed_tokens.weight, before) and torch.equal(untied.lm_head.weight, both.lm_head.weight)


def test_an_untied_head_is_rounded_when_asked_and_untie_means_the_same(tl8, make_llama):
    a = rtn(tl8, Format("int", 8, 64, symmetric=False), head="quantize")
    b = rtn(make_llama(), Format("int", 8, 64, symmetric=False), head="untie")
    assert "lm_head" in a.layers and "model.embed_tokens" not in a.layers and a.layers.keys() == b.layers.keys()


def test_a_group_size_that_does_not_divide_names_the_layer_and_leaves_the_model_as_it_was(make_llama):
    model = make_llama(hidden=72)
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    with pytest.raises(ValueError, match="group_size=32 does not divide the 72 columns") as raised:
        rtn(model, Format("int", 4, 32, symmetric=True))
    assert raised.value.__notes__ == ["in model.layers.0.self_attn.q_proj ([72, 72])"]
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, before)


def test_a_model_576_wide_takes_groups_of_64_and_not_of_128(make_llama):
    model = make_llama(hidden=576, ffn=1536, layers=1, heads=9, kv_heads=3)
    assert rtn(model, Format("int", 4, 64, symmetric=True)).summary["quantized_layers"] == 7
    with pytest.raises(ValueError, match="group_size=128 does not divide the 576 columns of the weight; the largest that does is 96"):
        rtn(model, Format("int", 4, 128, symmetric=True))


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            num_local_experts=4,
        )
    ).eval()  # fmt: skip


def test_the_experts_of_a_mixture_are_rounded_although_they_are_no_linear_layers():
    """Experts are fused 3-D parameters: a pass over linear layers reaches a tenth of such a model."""
    found = rtn(mixtral(), Format("int", 4, 32))
    assert found.summary["coverage"] > 0.99 and len(found.layers) == 2 * (4 + 4 * 3)
    assert found.layers["model.layers.1.mlp.experts.3.down_proj"].shape == (64, 128)


def test_a_pass_that_reaches_too_little_is_refused_with_the_numbers():
    model = mixtral()
    with pytest.raises(ValueError, match=r"reaches [\d,]+ of [\d,]+ weights outside embedding and head .*at least 95%.*experts"):
        rtn(model, {name: Format("int", 4, 32) for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.0.up_proj")})
