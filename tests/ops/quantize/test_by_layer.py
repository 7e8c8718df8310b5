"""What rounding did to each layer: numbers worked by hand, and kept as they were."""

import json

import pytest
import torch

from assay.ops.quantize import by_layer
from assay.ops.quantize.grid import Format, Quantized, Scales, quantize
from assay.ops.quantize.outliers import split


def test_one_layer_worked_by_hand():
    """ŵ - w is (0, 1, 0, -1, …): of a signal of 25 + 2·100 + 8 = 233 a noise of 1 + 4 = 5; the root of the mean square is √(233 / 8)."""
    weight = torch.tensor([[3.0, -4.0, 2.0, 2.0], [10.0, 0.0, -10.0, 0.0]])
    codes = torch.tensor([[3, -3, 2, 2], [4, 0, -5, 0]], dtype=torch.int8)
    rounded = Quantized(codes, Scales(torch.tensor([[1.0], [2.0]])), Format("int", 4, -1, scale="float32"))
    found = by_layer.harm(weight, rounded, output_error=0.1234567)
    assert found == {
        "form": "int4",
        "bits": 16.0,  # a word of 32 bits for four codes of four, and a scale of 32
        "snr_db": pytest.approx(16.6839, abs=1e-4),  # 10 log10(233 / 5)
        "largest_sigmas": pytest.approx(1.85296, abs=1e-5),  # 10 / √(233 / 8)
        "clipped_share": 0.0,
        "output_error": 0.123457,
    }


def test_a_range_that_clips_shows_as_the_share_of_weights_beyond_its_last_code():
    """Steps of 1 to ±8: of ten weights 9 and -12 are beyond by more than half a step; 7.4 and -8 are not."""
    weight = torch.tensor([[9.0, -12.0, 7.4, -8.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    codes = weight.round().clamp(-8, 7).to(torch.int8)
    found = by_layer.harm(weight, Quantized(codes, Scales(torch.ones(1, 1)), Format("int", 4, -1, scale="float32")))
    assert found["clipped_share"] == 0.2 and "output_error" not in found


def test_a_weight_that_did_not_change_has_no_ratio_to_noise_and_is_still_json():
    weight = torch.tensor([[1.0, -2.0, 3.0, 0.0]])
    rounded = Quantized(weight.to(torch.int8), Scales(torch.ones(1, 1)), Format("int", 4, -1, scale="float32"))
    found = by_layer.harm(weight, rounded)
    assert found["snr_db"] is None and json.loads(json.dumps(found, allow_nan=False)) == found


def test_columns_that_are_kept_count_with_their_sixteen_bits():
    """16 rows of 32: int8 of all with a scale of 16 bits a row, and 2 columns of 16 bits with their two places of 64."""
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    found = by_layer.harm(weight, split(weight, torch.tensor([1, 5]), Format("int", 8, -1)))
    assert found["bits"] == pytest.approx(8 + 16 / 32 + 16 * 2 / 32 + 2 * 64 / (16 * 32))
    assert found["form"] == "int8 with columns in bfloat16" and "clipped_share" not in found


def test_layers_come_back_in_their_order_and_none_where_nothing_was_kept(tmp_path):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    layers = {name: by_layer.harm(weight, quantize(weight, Format("int", bits, 32))) for name, bits in (("z.q", 4), ("a.k", 3))}
    by_layer.write(tmp_path, layers)
    assert list(by_layer.read(tmp_path).items()) == list(layers.items())
    assert layers["z.q"]["snr_db"] > layers["a.k"]["snr_db"] + 4  # six decibels a bit
    assert by_layer.read(tmp_path / "nothing") == {}
