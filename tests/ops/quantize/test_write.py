"""Packed files: opened as their README says, by our loader and by transformers, bit for bit, and of the bytes that are claimed."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from assay.ops.models import structure
from assay.ops.models.checkpoint import load_model, load_tokenizer, weights_path
from assay.ops.models.dense import weight_files
from assay.ops.quantize.activations import Activations
from assay.ops.quantize.grid import Format, dequantize, quantize
from assay.ops.quantize.layout import stored_bytes
from assay.ops.quantize.rtn import rtn
from assay.ops.quantize.runtime import Runtime, start
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
    stored = load_file(*weight_files(tmp_path / "out"))
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
    stored = load_file(*weight_files(tmp_path / "out"))
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
    stored = load_file(*weight_files(tmp_path / "out"))
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


# --- every format, as the README of the file says ----------------------------------------------------------------------------------------------

PLAIN, DEQUANTIZED = "from_pretrained(directory)", "CompressedTensorsConfig(dequantize=True)"
INT8, FP8 = Activations("int8"), Activations("fp8_e4m3")
STATIC = Activations("int8", "tensor", scale=torch.tensor([0.05]))
OF_FORMATS = {
    "fp8 a row": Format("e4m3", 8, -1), "fp8 a weight": Format("e4m3", 8, 0), "fp8 in blocks": Format("e4m3", 8, 32, 32),
    "mxfp8": Format("e4m3", 8, 32, scale="e8m0"), "mxfp4": Format("e2m1", 4, 32, scale="e8m0"), "nvfp4": Format("e2m1", 4, 16, scale="e4m3"),
    "int4 a weight": Format("int", 4, 0), "int4 a weight, asymmetric": Format("int", 4, 0, symmetric=False), "int8 a weight, asymmetric":
    Format("int", 8, 0, symmetric=False), "int6": Format("int", 6, 32),
}  # fmt: skip


def told(directory):
    """The ways to open it that its README has code for."""
    found = re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)
    return {PLAIN if PLAIN in code else DEQUANTIZED: code for code in found}


def opened(directory, code):
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "CompressedTensorsConfig": CompressedTensorsConfig,
        "torch": torch,
        "directory": directory,
    }
    return eval(code, names)


def save(model, directory, formats, activations=None, **named):
    """Round and save; the logits of the model that was rounded, its inputs rounded too."""
    found = rtn(model, formats, **named)
    runtime = Runtime(dict.fromkeys(structure.block_linears(model), activations) if activations else {})
    summary = save_packed(model, None, directory, found.layers, runtime=runtime)
    start(model, runtime)
    with torch.no_grad():
        return model(IDS).logits, summary


@torch.no_grad()
@pytest.mark.parametrize("name", OF_FORMATS)
def test_each_format_of_compressed_tensors_opens_both_ways_with_equal_logits(base, tmp_path, name):
    logits, summary = save(base(), tmp_path / "out", OF_FORMATS[name])
    ways = told(tmp_path / "out")
    assert summary["layout"] == "compressed-tensors" and summary["opens_plainly"] and set(ways) == {PLAIN, DEQUANTIZED}
    assert torch.equal(load_model(tmp_path / "out")(IDS).logits, logits)
    for code in ways.values():
        assert torch.equal(opened(tmp_path / "out", code)(IDS).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("format", "activations"),
    [
        (Format("int", 8, -1), INT8), (Format("int", 8, -1), STATIC), (Format("int", 8, -1), INT8._replace(symmetric=False)),
        (Format("int", 8, 32, symmetric=False), INT8), (Format("int", 4, -1), INT8), (Format("int", 4, 32), Activations("int4")),
        (Format("e4m3", 8, -1), FP8), (Format("e4m3", 8, 0), Activations("fp8_e4m3", "tensor", scale=torch.tensor([0.01]))),
        (Format("e4m3", 8, 32, 32), FP8),
    ],
    ids=str,
)  # fmt: skip
def test_rounded_inputs_are_rounded_alike_by_transformers(base, tmp_path, format, activations):
    """In float32 bit for bit. In bfloat16 it takes the scales of activations in bfloat16, so that some fall on another code."""
    logits, summary = save(base(), tmp_path / "out", format, activations)
    assert torch.equal(load_model(tmp_path / "out")(IDS).logits, logits)
    ways = told(tmp_path / "out")
    assert summary["opens_plainly"] and set(ways) == {PLAIN, DEQUANTIZED}
    wide = load_model(tmp_path / "out", dtype=torch.float32)
    rounded = wide(IDS).logits
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(theirs(IDS).logits, rounded)
    for module in wide.modules():
        module._forward_pre_hooks.clear()
    bare = wide(IDS).logits
    assert (bare - rounded).abs().mean() > 1e-3
    theirs = opened(tmp_path / "out", ways[PLAIN])(IDS).logits
    print("RATIO", (theirs - rounded).abs().mean() / (logits - rounded).abs().mean())
    assert (theirs - rounded).abs().mean() < 2 * (logits - rounded).abs().mean()
    alone = opened(tmp_path / "out", ways[DEQUANTIZED])  # the weights, as the README says
    assert torch.equal(alone.model.layers[0].mlp.up_proj.weight, wide.model.layers[0].mlp.up_proj.weight.bfloat16())
    assert "rounds activations as Assay does" in (tmp_path / "out" / "README.md").read_text()


@torch.no_grad()
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4"])
def test_formats_with_narrow_scales_and_rounded_inputs_open_in_bfloat16_alone_as_the_readme_says(base, tmp_path, name):
    save(base(), tmp_path / "out", OF_FORMATS[name], FP8)
    rounded = load_model(tmp_path / "out", dtype=torch.float32)(IDS).logits
    theirs = opened(tmp_path / "out", told(tmp_path / "out")[PLAIN])
    assert (theirs(IDS).logits - rounded).abs().mean() < 0.2 * rounded.abs().mean()
    with pytest.raises(RuntimeError, match="same dtype"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(IDS)
    assert "mxfp4, mxfp8 and nvfp4 it opens in bfloat16 alone" in (tmp_path / "out" / "README.md").read_text()


def mixed(model, *formats):
    return {name: formats[index % len(formats)] for index, name in enumerate(structure.block_linears(model))}


@torch.no_grad()
@pytest.mark.parametrize(
    "formats",
    [(Format("int", 8, 32), Format("int", 3, -1)), (Format("e2m1", 4, 16, scale="e4m3"), Format("e4m3", 8, -1), Format("int", 4, 32))],
    ids=["integers", "several kinds"],
)
def test_formats_that_differ_by_layer_open_plainly_and_not_dequantized_as_the_readme_says(base, tmp_path, formats):
    model = base()
    logits, summary = save(model, tmp_path / "out", mixed(model, *formats))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == len(formats) and summary["opens_plainly"]
    assert sorted(name for group in config["config_groups"].values() for name in group["targets"]) == sorted(structure.block_linears(model))
    assert torch.equal(load_model(tmp_path / "out")(IDS).logits, logits)
    ways = told(tmp_path / "out")
    assert set(ways) == {PLAIN} and "knows one format a checkpoint" in (tmp_path / "out" / "README.md").read_text()
    assert torch.equal(opened(tmp_path / "out", ways[PLAIN])(IDS).logits, logits)
    with pytest.raises(RuntimeError, match="the above report"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
        )


@torch.no_grad()
def test_what_transformers_opens_in_no_way_is_said_to_be_opened_by_assay_alone(base, tmp_path):
    """Layers with rounded inputs beside a packed embedding without: two formats, and an embedding."""
    logits, summary = save(base(), tmp_path / "out", Format("int", 8, -1), INT8, embeddings="quantize", head="quantize")
    assert not summary["opens_plainly"] and not told(tmp_path / "out")
    assert "`assay.ops.models.checkpoint.load_model(directory)` opens it" in (tmp_path / "out" / "README.md").read_text()
    assert torch.equal(load_model(tmp_path / "out")(IDS).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize(
    "format",
    [Format("e5m2", 8, -1), Format("nf4", 4, 64, scale="float32"), Format("ternary", 2, 0), Format("nf4", 4, 64, nested=True)],
    ids=str,
)
def test_what_compressed_tensors_lacks_is_in_our_own_layout_and_says_so(base, tmp_path, format):
    logits, summary = save(base(), tmp_path / "out", format)
    assert summary["layout"] == "assay" and not summary["opens_plainly"] and not told(tmp_path / "out")
    assert "Only Assay opens it" in (tmp_path / "out" / "README.md").read_text()
    assert torch.equal(load_model(tmp_path / "out")(IDS).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize(
    "format", [Format("int", 4, 16), Format("int", 3, 16, symmetric=False), Format("e2m1", 4, 16, scale="e4m3")], ids=str
)
def test_groups_of_columns_in_another_order_keep_their_index_and_are_not_given_to_who_ignores_it(base, tmp_path, format):
    """compressed-tensors 0.20 took the index of groups out; whoever opens such a file without it computes garbage."""
    model = base()
    layers = {}
    generator = torch.Generator().manual_seed(0)
    for name, module in structure.block_linears(model).items():
        cols = module.weight.shape[1]
        order = torch.randperm(cols, generator=generator)
        found = quantize(module.weight[:, order], format)
        back = order.argsort()
        layers[name] = found._replace(codes=found.codes[:, back].contiguous(), order=(back // 16).int())
        module.weight.copy_(layers[name].dense())
    logits = model(IDS).logits
    summary = save_packed(model, None, tmp_path / "out", layers)
    assert summary["layout"] == "assay" and not summary["opens_plainly"] and not told(tmp_path / "out")
    reopened = load_model(tmp_path / "out")
    assert torch.equal(reopened(IDS).logits, logits)
    stored = load_file(*weight_files(tmp_path / "out"))
    assert sum(name.endswith("weight_g_idx") for name in stored) == len(layers)


def test_one_scale_a_row_has_no_index_of_groups(base, tmp_path):
    save(base(), tmp_path / "out", Format("int", 4, -1))
    assert not any(name.endswith("g_idx") for name in load_file(*weight_files(tmp_path / "out")))


def test_every_part_of_a_weight_that_is_not_finite_is_refused(base, tmp_path):
    model = base()
    layers = rtn(model, Format("nf4", 4, 64, scale="float32", nested=True)).layers
    name, found = next(iter(layers.items()))
    nested = found.shared.nested
    broken = found._replace(shared=found.shared._replace(nested=nested._replace(largest=nested.largest * torch.nan)))
    with pytest.raises(ValueError, match=r"q_proj\.weight_scale_largest has 1 of 1 values that are NaN"):
        save_packed(model, None, tmp_path / "out", {**layers, name: broken})
    assert not (tmp_path / "out").exists()


def test_transformers_finds_no_weights_in_our_own_layout_where_it_would_make_some_up(base, tmp_path):
    model = base()
    save_packed(model, None, tmp_path / "out", rtn(model, Format("nf4", 4, 64, scale="float32")).layers)
    assert [path.name for path in weight_files(tmp_path / "out")] == ["assay.safetensors"]
    with pytest.raises(OSError, match=r"no file named .*model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert load_model(tmp_path / "out")(IDS).logits.isfinite().all()
    assert "`assay.safetensors`" in (tmp_path / "out" / "README.md").read_text()
