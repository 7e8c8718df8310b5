"""What a token reads of a checkpoint, against what its model really multiplies and what its file holds."""

import json

import pytest
import torch
from safetensors.torch import save_file

from assay.ops.cost.bytes import artifact_bytes
from assay.ops.cost.reads import reads
from assay.ops.decode.weights import open_weights


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_read_once_and_a_table_that_is_only_looked_up_is_not(make_llama, tmp_path, tied):
    make_llama(tied=tied).save_pretrained(tmp_path)
    found = reads(tmp_path)
    blocks = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert found == (blocks, 128 * 64, 4 * (blocks + 128 * 64), 4 * 4 * 4 * 16)
    assert found.matmul_parameters == sum(matrix.shape[0] * matrix.shape[1] for matrix in open_weights(tmp_path)[1].matrices())


def test_of_a_packed_checkpoint_codes_and_scales_are_read_and_its_weights_are_those_of_the_dense_one(tl8_dir, tmp_path):
    from assay.ops.apply import apply
    from assay.schemas.rounding import Quantize

    (tmp_path / "packed").mkdir()
    apply(Quantize(format="int4", group_size=32), tl8_dir, tmp_path / "packed")
    found, dense, stored = reads(tmp_path / "packed"), reads(tl8_dir), artifact_bytes(tmp_path / "packed")
    assert found.matmul_parameters == dense.matmul_parameters
    head = stored.embedding_bytes // (1 if json.loads((tl8_dir / "config.json").read_text())["tie_word_embeddings"] else 2)
    assert found.weight_bytes == stored.code_bytes + stored.scale_bytes + head


def test_of_experts_only_the_chosen_are_read(tmp_path):
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "num_local_experts": 4, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight": torch.zeros(8, 8) for expert in range(4)}
    tensors |= {"model.layers.0.block_sparse_moe.gate.weight": torch.zeros(4, 8), "lm_head.weight": torch.zeros(16, 8)}
    save_file({**tensors, "model.embed_tokens.weight": torch.zeros(16, 8), "model.norm.weight": torch.zeros(8)}, tmp_path / "m.safetensors")
    assert reads(tmp_path)[:3] == (64 + 32, 128, 4 * (64 + 32 + 128))
