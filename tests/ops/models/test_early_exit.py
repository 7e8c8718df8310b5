"""A model's own beginning: nothing but blocks is taken away, and a checkpoint of it keeps its tensors as they were stored."""

import json

import pytest
import torch
from safetensors.torch import load_file

from assay.ops.models.checkpoint import load_model, load_tokenizer, weights_path
from assay.ops.models.early_exit import early_exit, write_early_exit
from assay.ops.steps.quantize import rtn
from assay.schemas.rounding import Quantize

IDS = torch.arange(3, 43).unsqueeze(0)


@pytest.fixture
def packed_dir(tl8_dir, tmp_path):
    (tmp_path / "packed").mkdir()
    rtn(Quantize(format="int4", group_size=32), tl8_dir, tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def by_hand(model, layers):
    """Embedding, the first blocks, the final norm and the head, called one after another."""
    states = model.model.embed_tokens(IDS)
    places = torch.arange(IDS.shape[1]).unsqueeze(0)
    angles = model.model.rotary_emb(states, places)
    for block in model.model.layers[:layers]:
        states = block(states, position_ids=places, position_embeddings=angles)
    return model.lm_head(model.model.norm(states))


@torch.no_grad()
def test_the_first_blocks_are_followed_by_the_models_own_norm_and_head(tl8):
    expected = by_hand(tl8, 2)
    whole = tl8(IDS).logits
    assert early_exit(tl8, 2) is tl8 and tl8.config.num_hidden_layers == 2
    assert torch.allclose(tl8(IDS).logits, expected, atol=1e-4)
    assert not torch.allclose(expected, whole, atol=1)


@torch.no_grad()
def test_with_all_blocks_nothing_changes(tl8, tl8_dir, packed_dir, out, tmp_path):
    whole = tl8(IDS).logits
    assert torch.equal(early_exit(tl8, 4)(IDS).logits, whole)
    write_early_exit(tl8_dir, out, 4)
    assert torch.equal(load_model(out)(IDS).logits, whole)
    (tmp_path / "again").mkdir()
    write_early_exit(packed_dir, tmp_path / "again", 4)
    assert torch.equal(load_model(tmp_path / "again")(IDS).logits, load_model(packed_dir)(IDS).logits)


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_a_checkpoint_keeps_its_tensors_bit_for_bit_and_a_packed_one_stays_packed(packed, tl8_dir, packed_dir, out):
    parent = packed_dir if packed else tl8_dir
    told = write_early_exit(parent, out, 3)
    before, after = load_file(parent / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) - set(after) == {name for name in before if name.startswith("model.layers.3.")}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert told == {"layers": 3, "layers_before": 4, "tensors": len(after)}
    assert weights_path(out) == weights_path(parent) == ("dequantized" if packed else "dense")
    assert torch.allclose(load_model(out)(IDS).logits, early_exit(load_model(parent), 3)(IDS).logits, atol=1e-5)
    assert load_tokenizer(out)("one 2")["input_ids"] == load_tokenizer(parent)("one 2")["input_ids"]
    configs = [json.loads((directory / "config.json").read_text()) for directory in (parent, out)]
    assert configs[0].get("quantization_config") == configs[1].get("quantization_config") and configs[1]["num_hidden_layers"] == 3
    assert load_model(out).generation_config.eos_token_id == 2 and load_model(out).dtype == load_model(parent).dtype


@torch.no_grad()
def test_transformers_opens_it_and_decodes_with_its_cache(tl8_dir, out):
    from transformers import AutoModelForCausalLM, DynamicCache

    write_early_exit(tl8_dir, out, 2)
    model = AutoModelForCausalLM.from_pretrained(out)
    cache = DynamicCache(config=model.config)
    model(IDS[:, :20], cache=cache, use_cache=True)
    cached = model(IDS[:, 20:], cache=cache).logits
    assert torch.allclose(cached, model(IDS).logits[:, 20:], atol=1e-4)


def test_a_tied_model_stores_its_embedding_once_and_reopens(make_llama, save_checkpoint_dir, tmp_path, out):
    parent = save_checkpoint_dir(make_llama(tied=True).bfloat16(), tmp_path / "tied")
    write_early_exit(parent, out, 1)
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert load_model(out).dtype == torch.bfloat16
    assert torch.equal(load_model(out)(IDS).logits, early_exit(load_model(parent), 1)(IDS).logits)


def test_lists_of_the_config_are_cut_with_the_blocks(tmp_path, out, save_checkpoint_dir):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        use_sliding_window=True, sliding_window=8, max_window_layers=2,
    )  # fmt: skip
    parent = save_checkpoint_dir(Qwen2ForCausalLM(config), tmp_path / "qwen")
    write_early_exit(parent, out, 2)
    types = json.loads((parent / "config.json").read_text())["layer_types"]
    assert json.loads((out / "config.json").read_text())["layer_types"] == types[:2]


@pytest.mark.parametrize("layers", [0, 5, -1])
def test_blocks_that_are_not_there_are_refused(layers, tl8, tl8_dir, out):
    with pytest.raises(ValueError, match=rf"the first {layers} blocks of a model of 4; 1 to 4 can be taken"):
        early_exit(tl8, layers)
    with pytest.raises(ValueError, match="1 to 4 can be taken"):
        write_early_exit(tl8_dir, out, layers)
    assert not any(out.iterdir())
