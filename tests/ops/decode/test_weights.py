"""Weights as they are stored: what is found, kept packed, missing or left over."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.ops.decode.weights import assemble, open_weights, weights_of
from assay.ops.quantize.grid import Format, Quantized
from assay.ops.quantize.rtn import rtn
from assay.ops.quantize.write import save_packed


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_integers_of_a_packed_checkpoint_stay_the_integers_that_were_written(make_decoder, tmp_path, bits):
    format = Format("int", bits, 16, symmetric=False)
    model = make_decoder("llama with scaled rope, tied")
    layers = rtn(model, format, embeddings="quantize", head="quantize").layers
    save_packed(model, None, tmp_path, layers)
    _, weights = open_weights(tmp_path)
    assert weights.head is weights.embedding
    assert weights.forms == f"int{bits}"
    for name, matrix in (
        ("model.embed_tokens", weights.embedding),
        ("model.layers.1.self_attn.k_proj", weights.blocks[1].k),
        ("model.layers.2.mlp.down_proj", weights.blocks[2].mlps[0].down),
    ):
        assert isinstance(matrix.weight, Quantized)
        written = layers[name]
        assert matrix.weight.format == written.format and torch.equal(matrix.weight.codes, written.codes)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(matrix.weight.shared[:2], written.shared[:2], strict=True))
        assert matrix.shape == tuple(layers[name].codes.shape)


def test_forms_are_named_with_most_weights_first(make_decoder, tmp_path):
    format = Format("int", 4, 32, symmetric=True)
    model = make_decoder("llama").to(torch.bfloat16)
    save_packed(model, None, tmp_path, rtn(model, format).layers)
    shape, weights = open_weights(tmp_path)
    assert weights.forms == "int4+bfloat16"  # the head is dense
    assert len(weights.matrices()) == 4 * 7 + 1
    assert shape.family == "llama"


def test_experts_are_the_same_in_memory_and_in_a_file(make_decoder, tmp_path):
    model = make_decoder("mixtral with a window")
    model.save_pretrained(tmp_path)
    (_, held), (_, stored) = weights_of(model), open_weights(tmp_path)
    assert held.forms == stored.forms == "float32"
    for one, other in zip(held.blocks, stored.blocks, strict=True):
        assert torch.equal(one.router, other.router)
        assert len(one.mlps) == len(other.mlps) == 4
        for mine, theirs in zip(one.mlps, other.mlps, strict=True):
            assert all(torch.equal(a.weight, b.weight) for a, b in zip(mine, theirs, strict=True))


def test_a_tied_head_is_the_embedding_wherever_it_comes_from(make_decoder, tmp_path):
    model = make_decoder("qwen2 with a bias")
    assert (found := weights_of(model)[1]).head is found.embedding
    model.save_pretrained(tmp_path)
    assert (found := open_weights(tmp_path)[1]).head is found.embedding
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    assert (found := open_weights(tmp_path)[1]).head is found.embedding
    untied = weights_of(make_decoder("llama"))[1]
    assert untied.head is not untied.embedding


def test_what_is_missing_or_left_over_is_named_with_the_checkpoint(make_decoder, tmp_path):
    make_decoder("llama").save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for gone in ("lm_head.weight", "model.norm.weight", "model.layers.3.mlp.up_proj.weight"):
        save_file({name: tensor for name, tensor in whole.items() if name != gone}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"{gone} is missing") as caught:
            open_weights(tmp_path)
        assert str(tmp_path) in caught.value.__notes__[0]
    save_file(whole | {"model.layers.4.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensors belong to no part of a llama decoder: model.layers.4.mlp.up_proj.weight"):
        open_weights(tmp_path)


def test_frequencies_that_old_checkpoints_store_are_left_aside(tl8):
    shape, _ = weights_of(tl8)
    stored = dict(tl8.state_dict()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert assemble(shape, stored, {}).norm is stored["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quant_method": "gptq", "format": None},
            "is quantized by 'gptq'; dense and compressed-tensors checkpoints, and those in Assay's own layout",
        ),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 6, "type": "float"}}}},
            "stores weights as float of 6 bits; integers of 2 to 8 bits",
        ),
        ({"config_groups": {"a": {"weights": {"num_bits": 4, "type": "complex"}}}}, "stores weights as complex of 4 bits"),
    ],
)
def test_a_quantization_that_is_not_read_is_refused(tl8_dir, change, message):
    import json

    config = json.loads((tl8_dir / "config.json").read_text())
    plain = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 4}}}}
    (tl8_dir / "config.json").write_text(json.dumps(config | {"quantization_config": plain | change}))
    with pytest.raises(ValueError, match=message):
        open_weights(tl8_dir)
