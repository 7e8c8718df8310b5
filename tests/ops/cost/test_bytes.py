"""Bytes of checkpoints as they lie on disk, and of a token of context."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from assay.ops.cost.bytes import artifact_bytes, kv_bytes_per_token, kv_shape, stored_tensors


def checkpoint(directory, **tensors):
    directory.mkdir(exist_ok=True)
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def packed(rows, cols, bits, group, *, zeros=False, name="model__layers__0__mlp__up_proj"):
    """What the pack-quantized format stores for one linear: 32-bit words of codes, 16-bit scales, packed zero points, the shape."""
    words = math.ceil(cols * bits / 32)
    found = {
        f"{name}__weight_packed": torch.zeros(rows, words, dtype=torch.int32),
        f"{name}__weight_scale": torch.ones(rows, cols // group, dtype=torch.bfloat16),
        f"{name}__weight_shape": torch.tensor([rows, cols]),
    }
    if zeros:
        found[f"{name}__weight_zero_point"] = torch.zeros(math.ceil(rows * bits / 32), cols // group, dtype=torch.int32)
    return found


def test_bits_per_weight_of_four_bit_groups_of_128_worked_by_hand(tmp_path):
    """4,096 weights: 2,048 bytes of codes and 32 scales of 2 bytes are 4.125 bits. Counting the bytes' numel, or leaving scales out, gives 4."""
    found = artifact_bytes(checkpoint(tmp_path / "a", **packed(32, 128, 4, 128)))
    assert (found.code_bytes, found.scale_bytes, found.quantized_weights) == (2048, 64, 4096)
    assert found.quantized_bits_per_weight == 4.125
    assert found.other_bytes == 16 and found.bits_per_weight == 8 * (2048 + 64 + 16) / 4096  # the stored shape is a cost as well


@pytest.mark.parametrize(("rows", "cols", "bits", "group", "zeros", "expected"), [
    (64, 64, 4, 64, False, 4.25), (64, 64, 4, 64, True, 4.25 + 4 / 64), (64, 64, 4, 32, False, 4.5),
    (64, 128, 8, 128, False, 8.125), (128, 128, 4, 128, True, 4.15625), (64, 64, 2, 64, False, 2.25),
])  # fmt: skip
def test_scales_and_zero_points_count(tmp_path, rows, cols, bits, group, zeros, expected):
    assert artifact_bytes(checkpoint(tmp_path / "a", **packed(rows, cols, bits, group, zeros=zeros))).quantized_bits_per_weight == expected


def test_bfloat16_is_exactly_16_bits_and_nothing_of_it_is_quantized(tmp_path):
    found = artifact_bytes(checkpoint(tmp_path / "a", model__layers__0__mlp__up_proj__weight=torch.randn(64, 64).bfloat16()))
    assert found.bits_per_weight == 16 and found.quantized_bits_per_weight is None and found.size_bytes == 8192


def test_zeros_of_a_dense_tensor_cost_what_other_numbers_cost(tmp_path):
    dense, pruned = torch.randn(64, 64), torch.zeros(64, 64)
    assert artifact_bytes(checkpoint(tmp_path / "a", w__weight=dense)) == artifact_bytes(checkpoint(tmp_path / "b", w__weight=pruned))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_stored_and_counted_once(make_llama, tmp_path, tied):
    model = make_llama(tied=tied)
    model.save_pretrained(tmp_path / "a")
    found = artifact_bytes(tmp_path / "a")
    table, linears = 128 * 64 * 4, 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 4
    assert found.embedding_bytes == (1 if tied else 2) * table
    assert found.code_bytes == linears and found.scale_bytes == 0 and found.other_bytes == 9 * 64 * 4
    assert found.size_bytes == sum(parameter.numel() * 4 for parameter in model.parameters())
    assert found.weights == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("format", "symmetric", "expected"), [("int4", True, 4.5), ("int4", False, 4.5 + 4 / 32), ("int8", True, 8.5)])
def test_our_own_quantized_checkpoint_is_billed_what_its_file_holds(tl8_dir, tmp_path, format, symmetric, expected):
    """The parts add up to the file less its header, and the weights are those of the dense model."""
    from assay.ops.apply import apply
    from assay.schemas.rounding import Quantize

    directory = tmp_path / "packed"
    directory.mkdir()
    apply(Quantize(format=format, group_size=32, symmetric=symmetric), tl8_dir, directory)
    found, dense = artifact_bytes(directory), artifact_bytes(tl8_dir)
    assert found.quantized_bits_per_weight == pytest.approx(expected)
    assert found.weights == dense.weights and found.embedding_bytes == dense.embedding_bytes
    file = directory / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert found.size_bytes == file.stat().st_size - 8 - header
    assert found.size_bytes == found.code_bytes + found.scale_bytes + found.embedding_bytes + found.other_bytes


def test_a_quantized_embedding_belongs_to_the_embeddings_and_to_the_quantized(tmp_path):
    found = artifact_bytes(checkpoint(tmp_path / "a", **packed(64, 64, 8, 64, name="model__embed_tokens")))
    assert found.code_bytes == found.scale_bytes == 0 and found.embedding_bytes == 4096 + 128 + 16
    assert found.quantized_weights == 4096 and found.quantized_bits_per_weight == 8.25


def test_only_the_shards_of_the_index_are_the_checkpoint(tmp_path):
    for name, tensor in (("a", torch.zeros(4)), ("b", torch.zeros(8)), ("left_over", torch.zeros(100))):
        save_file({f"{name}.weight": tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a.weight": "a.safetensors", "b.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert artifact_bytes(tmp_path).size_bytes == 48
    assert {tensor.name for tensor in stored_tensors(tmp_path)} == {"a.weight", "b.weight"}


def test_a_name_in_two_files_counts_once(tmp_path):
    for file in ("a", "b"):
        save_file({"w.weight": torch.zeros(4)}, tmp_path / f"{file}.safetensors")
    assert artifact_bytes(tmp_path).size_bytes == 16


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors file"):
        artifact_bytes(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"w.weight": torch.zeros(64)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="cut short"):
        artifact_bytes(tmp_path)
    file.write_bytes(b"not a header")
    with pytest.raises(ValueError, match="no whole safetensors file"):
        artifact_bytes(tmp_path)
    save_file({"m.weight_packed": torch.zeros(4, 4, dtype=torch.int32), "m.weight_scale": torch.zeros(4, 1)}, file)
    with pytest.raises(ValueError, match=r"m\.weight_shape does not say how many weights"):
        artifact_bytes(tmp_path)


@pytest.mark.parametrize(("layers", "heads", "width", "store", "expected"), [
    (80, 8, 128, "bfloat16", 320 * 1024), (32, 8, 128, "bfloat16", 128 * 1024), (80, 8, 128, "fp8_e4m3", 160 * 1024),
    (80, 8, 128, "int8", 2 * 80 * 8 * (128 + 2)), (30, 3, 64, "float32", 46_080), (1, 1, 1, "float16", 4),
])  # fmt: skip
def test_bytes_of_a_token_of_context_worked_by_hand(layers, heads, width, store, expected):
    """70B-class: 320 KiB in bfloat16; 8B-class: 128 KiB; 8 bits halve it, less what int8 scales take."""
    assert kv_bytes_per_token(layers, heads, width, store) == expected


def test_an_unknown_store_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match="fp8_e4m3, int8"):
        kv_bytes_per_token(1, 1, 1, "int4")


@pytest.mark.parametrize("store", [None, "fp8_e4m3", "int8"])
def test_the_formula_is_what_our_cache_really_holds(tl8, store):
    """Quantize-dequantize kept in full precision and billed at fewer bits is the usual false KV saving."""
    from assay.ops.kv.cache import make_cache

    cache = make_cache(tl8, store)
    with torch.inference_mode():
        tl8(input_ids=torch.ones(1, 10, dtype=torch.int64), cache=cache, use_cache=True)
    assert cache.nbytes() == 10 * kv_bytes_per_token(*kv_shape(tl8.config), store or "float32")


def test_the_shape_of_the_cache_follows_the_config():
    plain = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    assert kv_shape(plain) == (3, 4, 16)
    assert kv_shape({**plain, "num_key_value_heads": 2, "head_dim": 32}) == (3, 2, 32)
    assert kv_shape({"text_config": plain, "vision_config": {}}) == (3, 4, 16)
    kinds = ["full_attention", "linear_attention", "sliding_attention"]
    assert kv_shape({**plain, "layer_types": kinds}) == (2, 4, 16)
