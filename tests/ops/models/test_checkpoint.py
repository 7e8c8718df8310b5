"""Opening and writing checkpoints."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.ops.models.checkpoint import load_model, load_tokenizer, save_checkpoint, weights_path
from assay.ops.models.dense import require_dense

IDS = torch.arange(3, 43).unsqueeze(0)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_a_saved_model_reopens_with_the_same_logits(tl8, tl8_dir, tmp_path):
    model = load_model(tl8_dir)
    assert not model.training and model.config._attn_implementation == "sdpa" and weights_path(tl8_dir) == "dense"
    assert torch.equal(model(IDS).logits, tl8(IDS).logits)
    save_checkpoint(model, load_tokenizer(tl8_dir), tmp_path / "again")
    assert torch.equal(load_model(tmp_path / "again")(IDS).logits, tl8(IDS).logits)


def test_two_saves_of_one_model_are_the_same_bytes_and_name_no_path(tl8_dir, tmp_path):
    for name in ("a", "b"):
        save_checkpoint(load_model(tl8_dir), load_tokenizer(tl8_dir), tmp_path / name)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert str(tmp_path) not in "".join(path.read_text() for path in (tmp_path / "a").glob("*.json"))


def test_tokenizer_files_are_copied_unchanged_when_a_directory_is_given(tl8, tl8_dir, tmp_path):
    save_checkpoint(tl8, tl8_dir, tmp_path / "copy")
    assert digests(tmp_path / "copy")["tokenizer.json"] == digests(tl8_dir)["tokenizer.json"]
    text = "one two 3"
    assert load_tokenizer(tmp_path / "copy")(text)["input_ids"] == load_tokenizer(tl8_dir)(text)["input_ids"]


def test_the_dtype_is_the_stored_one_unless_asked(make_llama, tmp_path):
    save_checkpoint(make_llama().bfloat16(), None, tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16
    wide = load_model(tmp_path, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert all(torch.equal(wide.state_dict()[name].bfloat16(), tensor) for name, tensor in load_model(tmp_path).state_dict().items())


def test_a_published_generation_config_that_names_a_temperature_and_does_not_sample_can_be_saved(tl8, tmp_path):
    tl8.generation_config.do_sample = False
    tl8.generation_config.temperature = 0.6
    save_checkpoint(tl8, None, tmp_path)
    found = load_model(tmp_path).generation_config
    assert not found.do_sample and found.temperature in (None, 1.0)
    assert found.eos_token_id == 2


def test_weights_are_readable_by_whoever_can_read_the_config(tl8, tmp_path):
    save_checkpoint(tl8, None, tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_opening_prints_nothing(tl8_dir, capfd):
    load_model(tl8_dir)
    assert capfd.readouterr() == ("", "")


def test_a_weight_that_is_missing_is_an_error_and_never_random(tl8_dir):
    path = tl8_dir / "model.safetensors"
    state = load_file(path)
    del state["model.layers.2.mlp.up_proj.weight"]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing from the file .*model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(tl8_dir)


def test_a_weight_of_another_shape_or_left_over_is_an_error(tl8_dir):
    path = tl8_dir / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"] = torch.zeros(120, 64)
    state["model.layers.4.mlp.up_proj.weight"] = torch.zeros(128, 64)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.4\.mlp\.up_proj\.weight.*another shape.*lm_head\.weight"):
        load_model(tl8_dir)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_written_and_the_tensor_is_named(tl8, tmp_path, value):
    with torch.no_grad():
        tl8.model.layers[1].mlp.gate_proj.weight[0, :2] = value
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight has 2 of 8,192 values"):
        save_checkpoint(tl8, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pickles_are_not_read(tl8, tmp_path):
    tl8.config.save_pretrained(tmp_path)
    torch.save(tl8.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file \(but pytorch_model\.bin\); only safetensors"):
        load_model(tmp_path)


def test_an_empty_directory_and_a_missing_tokenizer_say_what_was_expected(tl8, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_model(tmp_path)
    save_checkpoint(tl8, None, tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer files"):
        load_tokenizer(tmp_path)


def test_another_quantization_method_is_refused_by_name(tl8_dir):
    path = tl8_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ValueError, match="quantized by 'gptq'; dense and compressed-tensors"):
        load_model(tl8_dir)
    assert weights_path(tl8_dir) == "dequantized"
    with pytest.raises(ValueError, match="prune_depth changes dense weights, but its parent is already quantized \\(gptq"):
        require_dense(tl8_dir, "prune_depth")


def test_code_that_a_checkpoint_brings_is_not_run(tl8_dir):
    path = tl8_dir / "config.json"
    config = json.loads(path.read_text()) | {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    path.write_text(json.dumps(config))
    marker = tl8_dir / "ran"
    (tl8_dir / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(ValueError, match=r"trust_remote_code|homemade"):
        load_model(tl8_dir)
    assert not marker.exists()
