"""Finding the parts of a model, and counting what a pass reached."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from assay.ops.models import structure


@pytest.fixture
def mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def test_the_parts_of_a_llama_are_found_by_name(tl8):
    assert structure.blocks_path(tl8) == "model.layers"
    assert len(structure.blocks(tl8)) == 4
    assert structure.embedding(tl8)[0] == "model.embed_tokens"
    assert structure.head(tl8)[0] == "lm_head"
    linears = structure.block_linears(tl8)
    assert len(linears) == 4 * 7 and "lm_head" not in linears


def test_tied_means_one_tensor_in_memory_whatever_the_config_says(make_llama):
    model = make_llama(tied=True)
    assert structure.is_tied(model)
    model.config.tie_word_embeddings = False
    assert structure.is_tied(model)
    assert not structure.is_tied(make_llama(tied=False))


def test_untying_gives_the_head_a_copy_that_can_change_alone(make_llama, tmp_path):
    model = make_llama(tied=True)
    structure.untie(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(model.lm_head.weight, 2 * model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    reopened = type(model).from_pretrained(tmp_path)
    assert torch.equal(reopened.lm_head.weight, 2 * reopened.model.embed_tokens.weight)


def test_experts_that_are_3d_parameters_are_seen_so_a_linear_only_pass_is_refused(mixtral):
    """A pass over nn.Linear reaches a tenth of a mixture: fused experts are plain parameters."""
    linears = {f"{name}.weight" for name in structure.block_linears(mixtral)}
    found = structure.coverage(mixtral, linears)
    assert 0 < found.share < 0.2
    assert any("experts" in name for name in found.missed)
    with pytest.raises(ValueError, match=r"reaches [\d,]+ of [\d,]+ weights .*experts"):
        structure.require_coverage(mixtral, linears, at_least=0.95)
    everything = {name for name, _ in structure.matrices(mixtral)}
    assert structure.require_coverage(mixtral, everything).share == 1.0


def test_coverage_counts_weights_outside_embedding_and_head(tl8):
    # a block: q and o 64x64, k and v 32x64, three of 64x128
    block = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
    found = structure.coverage(tl8, {f"{name}.weight" for name in structure.block_linears(tl8) if not name.endswith("down_proj")})
    assert found.total == 4 * block
    assert found.reached == 4 * (block - 64 * 128)
    assert [name.rsplit(".", 2)[-2] for name in found.missed] == ["down_proj"] * 4


def test_shape_numbers_are_those_of_the_model(make_llama):
    assert structure.shape_numbers(make_llama(tied=True)) == {
        "layers": 4, "hidden_size": 64, "intermediate_size": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab_size": 128, "tied": True,
    }  # fmt: skip


def test_a_model_whose_blocks_cannot_be_told_is_refused(tl8):
    tl8.model.others = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    with pytest.raises(ValueError, match=r"2 lists of 4 blocks \(model.layers, model.others\)"):
        structure.blocks(tl8)
