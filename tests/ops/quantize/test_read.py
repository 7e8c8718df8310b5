"""Packed checkpoints that compressed-tensors wrote by itself, and what cannot be read."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

from assay.ops.models.checkpoint import load_model
from assay.ops.quantize.grid import Format, fit
from assay.ops.quantize.read import read_weights, require_known
from assay.ops.quantize.rtn import rtn
from assay.ops.quantize.write import save_packed, scheme_of

FORMATS = {
    "int4 in groups": Format("int", 4, 32), "int4, asymmetric": Format("int", 4, 32, symmetric=False), "int3 a row": Format("int", 3, -1),
    "int8 a row, asymmetric": Format("int", 8, -1, symmetric=False), "int4 a weight, asymmetric": Format("int", 4, 0, symmetric=False),
    "fp8 a row": Format("e4m3", 8, -1), "fp8 a weight": Format("e4m3", 8, 0), "fp8 in blocks": Format("e4m3", 8, 32, 32),
    "mxfp4": Format("e2m1", 4, 32, scale="e8m0"), "nvfp4": Format("e2m1", 4, 16, scale="e4m3"), "mxfp8": Format("e4m3", 8, 32, scale="e8m0"),
}  # fmt: skip
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj")


@pytest.mark.parametrize("inputs", [False, True], ids=["weights", "inputs too"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_compressed_tensors_packed_is_read_as_what_it_unpacks_itself(name, inputs, tl8, tl8_dir):
    """Codes, words and nibbles by their library, from our scales: nothing of ours has packed these."""
    format = FORMATS[name]
    found = scheme_of(format, rounds_inputs=inputs)
    assert found is not None
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**found.weights))
    compressor = BaseCompressor.get_value_from_registry(found.format)
    state = load_file(tl8_dir / "model.safetensors")
    expected = {}
    for layer in NAMES:
        weight = state.pop(f"{layer}.weight")
        scales, zeros, factor, _ = fit(weight, format)
        parts = {"weight": weight.bfloat16(), "weight_scale": scales.reshape(1) if format.group_size == 0 else scales}
        if zeros is not None:
            parts["weight_zero_point"] = zeros.reshape(1) if format.group_size == 0 else zeros
        if factor is not None:
            parts |= {"weight_global_scale": factor, "weight_scale": scales.float()}
        packed = compressor.compress(parts, scheme)
        expected[layer] = compressor.decompress(packed, scheme)["weight"].bfloat16()
        state |= {f"{layer}.{part}": tensor for part, tensor in packed.items()}
    save_file(state, tl8_dir / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tl8_dir / "config.json").read_text())
    quantization = QuantizationConfig(config_groups={"group_0": scheme}, format=found.format, ignore=["lm_head"]).model_dump(mode="json")
    (tl8_dir / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    stored = read_weights(tl8_dir)
    assert set(stored.packed) == set(NAMES)
    for layer in NAMES:
        assert torch.equal(stored.packed[layer].dense().bfloat16(), expected[layer]), layer
    model = load_model(tl8_dir, dtype=torch.bfloat16)
    assert torch.equal(model.get_submodule(NAMES[0]).weight, expected[NAMES[0]])


def test_an_index_of_groups_in_a_file_of_older_versions_is_followed(tl8, tmp_path):
    """compressed-tensors wrote it up to 0.19; a reader that passes it by computes garbage."""
    layers = rtn(tl8, Format("int", 4, 16)).layers
    save_packed(tl8, None, tmp_path, layers)
    stored = load_file(tmp_path / "model.safetensors")
    index = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    save_file(stored | {f"{NAMES[0]}.weight_g_idx": index}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found, plain = read_weights(tmp_path).packed[NAMES[0]].dense(), layers[NAMES[0]]
    expected = plain.codes.float() * plain.shared.scales.float()[:, index.long()]
    assert torch.equal(found, expected) and not torch.equal(found, plain.dense())


def test_what_is_dense_in_a_packed_checkpoint_is_given_apart_and_nothing_twice(tl8, tmp_path):
    layers = rtn(tl8, Format("nf4", 4, 64, scale="float32", nested=True)).layers
    save_packed(tl8, None, tmp_path, layers)
    stored = read_weights(tmp_path)
    assert set(stored.packed) == set(layers) and "lm_head.weight" in stored.dense and "model.norm.weight" in stored.dense
    assert not any(name.rpartition(".")[0] in layers for name in stored.dense)
    assert all(torch.equal(stored.packed[name].dense(), layer.dense()) for name, layer in layers.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"quant_method": "awq"},
            r"is quantized by 'awq'; dense and compressed-tensors checkpoints, and those in Assay's own layout, can be opened",
        ),
        ({"config_groups": {"a": {"weights": {"num_bits": 6, "type": "float"}}}}, "stores weights as float of 6 bits"),
        ({"config_groups": {"a": {"weights": None}}}, "stores weights as None of None bits"),
    ],
    ids=["method", "bits", "activations alone"],
)
def test_another_quantization_is_refused_by_its_config_before_weights_are_read(tl8_dir, change, said):
    config = json.loads((tl8_dir / "config.json").read_text())
    (tl8_dir / "model.safetensors").unlink()
    (tl8_dir / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "compressed-tensors"} | change}))
    for read in (require_known, read_weights, load_model):
        with pytest.raises(ValueError, match=said):
            read(tl8_dir)


def test_a_file_of_our_own_layout_that_says_a_kind_of_a_newer_version_is_refused(tl8, tmp_path):
    save_packed(tl8, None, tmp_path, rtn(tl8, Format("ternary", 2, 0)).layers)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kinds"][0]["kind"] = "hologram"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"of kind 'hologram' is stored; .* it may be of a newer version"):
        load_model(tmp_path)
