"""Packed files: the codes come back bit for bit, by our loader and by others', and take the bytes that are claimed."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from assay.ops.models.checkpoint import load_model, load_tokenizer, weights_path
from assay.ops.quantize.grid import Format, dequantize, quantize
from assay.ops.quantize.layout import stored_bytes
from assay.ops.quantize.pack import pack, unpack
from assay.ops.quantize.rtn import rtn
from assay.ops.quantize.write import save_packed

IDS = torch.arange(3, 43).unsqueeze(0)
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


@pytest.fixture
def base(make_llama, tmp_path):
    """A saved bfloat16 model, opened: ``make(tied=…)``."""

    def make(**arguments):
        directory = tmp_path / "base"
        make_llama(**arguments).bfloat16().save_pretrained(directory)
        return load_model(directory)

    return make


def rounded(model, directory, *, bits, group_size, symmetric, embeddings="skip", head="skip"):
    """Round and save; what the rounded model computes, the weights it computes with, and the summary."""
    found = rtn(model, Format("int", bits, group_size, symmetric=symmetric), embeddings=embeddings, head=head)
    with torch.no_grad():
        logits = model(IDS).logits.clone()
    summary = save_packed(model, None, directory, found.layers)
    return logits, {name: dequantize(quantized) for name, quantized in found.layers.items()}, summary


@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(2, 8), rows=st.integers(1, 9), cols=st.integers(1, 70), seed=st.integers(0, 10_000), along_rows=st.booleans()
)  # fmt: skip
def test_unpacking_gives_back_the_codes_at_any_width_and_odd_lengths(bits, rows, cols, seed, along_rows):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, cols), generator=generator).to(torch.int8)
    packed = pack(codes, bits=bits, along_rows=along_rows)
    assert packed.dtype == torch.int32
    assert packed.shape == ((-(-rows * bits // 32), cols) if along_rows else (rows, -(-cols * bits // 32)))
    assert torch.equal(unpack(packed, bits=bits, shape=(rows, cols), along_rows=along_rows), codes)


def test_all_256_pairs_of_nibbles_survive_packing():
    """An accumulator that is not cleared, or a sign lost in a nibble, shows in some pair."""
    pairs = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    assert torch.equal(unpack(pack(pairs, bits=4), bits=4, shape=(256, 2)), pairs)
    flat = pairs.reshape(1, 512)
    assert torch.equal(unpack(pack(flat, bits=4), bits=4, shape=(1, 512)), flat)
    assert pack(torch.tensor([[-8, 7, 0, -1, 1, 0, 0, 0]], dtype=torch.int8), bits=4).view(torch.uint8).tolist() == [
        [0xF0, 0x78, 0x89, 0x88]
    ]


@torch.no_grad()
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_a_symmetric_checkpoint_opens_by_itself_with_equal_logits(base, tmp_path, bits, group_size):
    logits, weights, summary = rounded(base(), tmp_path / "out", bits=bits, group_size=group_size, symmetric=True)
    assert summary["opens_plainly"] and weights_path(tmp_path / "out") == "dequantized"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(plain(IDS).logits, logits)
    assert torch.equal(load_model(tmp_path / "out")(IDS).logits, logits)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load_model(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(wide(IDS).logits, ours(IDS).logits)
    assert all(torch.equal(ours.get_submodule(name).weight, weight) for name, weight in weights.items())


@torch.no_grad()
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_an_asymmetric_checkpoint_opens_dequantized_with_equal_logits(base, tmp_path, bits, group_size):
    logits, weights, summary = rounded(base(), tmp_path / "out", bits=bits, group_size=group_size, symmetric=False)
    assert not summary["opens_plainly"]
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert torch.equal(other(IDS).logits, logits)
    assert torch.equal(load_model(tmp_path / "out")(IDS).logits, logits)
    ours = load_model(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(ours.get_submodule(name).weight, weight) for name, weight in weights.items())


def test_an_asymmetric_checkpoint_still_does_not_open_plainly_as_its_readme_says(base, tmp_path):
    """transformers expects zero points unpacked. When this fails, they can be opened, and README and loader may say so."""
    rounded(base(), tmp_path / "out", bits=4, group_size=32, symmetric=False)
    with pytest.raises(RuntimeError, match="mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (
        "does not open packed zero points or a packed embedding by a plain `from_pretrained`"
        in (tmp_path / "out" / "README.md").read_text()
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("tied", "embeddings", "head", "plain"),
    [(True, "skip", "skip", True), (True, "quantize", "quantize", False), (True, "skip", "untie", True), (True, "quantize", "untie", False),
     (False, "skip", "quantize", True), (False, "quantize", "quantize", False)],
)  # fmt: skip
def test_every_policy_for_embedding_and_head_reopens_with_the_rounded_logits(base, tmp_path, tied, embeddings, head, plain):
    logits, _, summary = rounded(base(tied=tied), tmp_path / "out", bits=4, group_size=32, symmetric=True, embeddings=embeddings, head=head)
    assert summary["opens_plainly"] == plain
    ours = load_model(tmp_path / "out")
    assert torch.equal(ours(IDS).logits, logits)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (tied and head != "untie")
    if plain:
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits, logits)
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert torch.equal(other(IDS).logits, logits)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    shared = tied and head != "untie"
    assert any(name.startswith("lm_head.") for name in stored) == (not shared)  # a shared tensor is stored once


@torch.no_grad()
def test_one_group_a_row_is_the_group_of_the_whole_width_and_does_not_reload_as_zeros(base, tmp_path):
    for name, group_size in (("row", -1), ("whole", 72)):
        rounded(base(hidden=72, ffn=72), tmp_path / name, bits=4, group_size=group_size, symmetric=True)
    row, whole = load_model(tmp_path / "row"), load_model(tmp_path / "whole")
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in row.state_dict().items())
    assert row.model.layers[0].mlp.up_proj.weight.abs().max() > 0


@pytest.mark.parametrize(
    ("bits", "symmetric", "expected"),
    # per group of 128: a scale of 16 bits, and a zero point of as many bits as a code
    [(4, True, 4 + 16 / 128), (4, False, 4 + 20 / 128), (8, True, 8 + 16 / 128), (3, True, 3 + 16 / 128), (2, False, 2 + 18 / 128)],
)
def test_bits_per_weight_count_scales_and_zero_points(bits, symmetric, expected):
    """Packed bytes taken for weights, or scales and zeros left out, make up numbers such as 4.0 or 1.0."""
    found = quantize(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), Format("int", bits, 128, symmetric=symmetric))
    assert 8 * stored_bytes(found) / (64 * 128) == expected


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (3, -1), (2, 32)])
def test_reported_bytes_are_those_of_the_tensors_on_disk(base, tmp_path, bits, group_size, symmetric):
    _, weights, summary = rounded(
        base(hidden=72 if group_size == -1 else 64), tmp_path / "out", bits=bits, group_size=group_size, symmetric=symmetric
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    on_disk = sum(tensor.nbytes for name, tensor in stored.items() if name.endswith(("weight_packed", "weight_scale", "weight_zero_point")))
    assert summary["packed_bytes"] == on_disk
    assert summary["packed_weights"] == sum(weight.numel() for weight in weights.values())
    assert summary["bits_per_weight"] == pytest.approx(8 * on_disk / summary["packed_weights"])
    assert any(name.endswith("weight_zero_point") for name in stored) != symmetric


def test_two_saves_are_the_same_bytes_and_name_no_path(base, tmp_path):
    digests = []
    for name in ("a", "b"):
        rounded(base(), tmp_path / name, bits=4, group_size=32, symmetric=False)
        digests.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(tmp_path / name).iterdir()})
    assert digests[0] == digests[1] and "README.md" in digests[0]
    assert str(tmp_path) not in "".join(path.read_text() for pattern in ("*.json", "*.md") for path in (tmp_path / "a").glob(pattern))


def test_the_config_says_what_is_packed_and_the_readme_how_it_opens(base, tmp_path):
    rounded(base(), tmp_path / "out", bits=3, group_size=32, symmetric=True)
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (found["quant_method"], found["format"], found["ignore"]) == ("compressed-tensors", "pack-quantized", ["lm_head"])
    (group,) = found["config_groups"].values()
    assert {key: group["weights"][key] for key in ("num_bits", "group_size", "symmetric", "type", "strategy")} == {
        "num_bits": 3, "group_size": 32, "symmetric": True, "type": "int", "strategy": "group",
    }  # fmt: skip
    assert "AutoModelForCausalLM.from_pretrained(directory)" in (tmp_path / "out" / "README.md").read_text()


@torch.no_grad()
def test_the_models_own_dtype_does_not_change_what_is_stored(make_llama, tmp_path):
    make_llama().save_pretrained(tmp_path / "wide")
    model = load_model(tmp_path / "wide")
    logits, weights, _ = rounded(model, tmp_path / "out", bits=4, group_size=32, symmetric=True)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if name.endswith("weight_scale")} == {torch.bfloat16}
    ours = load_model(tmp_path / "out")
    assert ours.dtype == torch.float32 and torch.equal(ours(IDS).logits, logits)
    assert all(torch.equal(ours.get_submodule(name).weight, weight) for name, weight in weights.items())


def test_packing_prints_nothing(base, tmp_path, capfd):
    model = base()
    capfd.readouterr()
    rounded(model, tmp_path / "out", bits=4, group_size=32, symmetric=True)
    load_model(tmp_path / "out")
    assert capfd.readouterr() == ("", "")


def test_a_tensor_that_is_not_finite_is_not_written(base, tmp_path):
    model = base()
    found = rtn(model, Format("int", 4, 32))
    up = found.layers["model.layers.0.mlp.up_proj"]
    scales = up.shared.scales.clone()
    scales[0, 0] = torch.inf
    layers = found.layers | {"model.layers.0.mlp.up_proj": up._replace(shared=up.shared._replace(scales=scales))}
    with pytest.raises(ValueError, match=r"up_proj\.weight_scale has 1 of"):
        save_packed(model, None, tmp_path / "out", layers)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"lm_head\.weight has 1 of"):
        save_packed(model, None, tmp_path / "out", found.layers)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_the_parent_comes_along(tl8_dir, tmp_path):
    model = load_model(tl8_dir)
    found = rtn(model, Format("int", 4, 32))
    save_packed(model, tl8_dir, tmp_path / "out", found.layers)
    assert load_tokenizer(tmp_path / "out")("a 1")["input_ids"] == load_tokenizer(tl8_dir)("a 1")["input_ids"]
