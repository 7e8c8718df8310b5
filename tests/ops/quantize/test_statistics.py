"""Facts about what is hard to round."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize.grid import Format, dequantize, quantize
from assay.ops.quantize.statistics import (
    clipped_share,
    largest_activation,
    largest_inputs,
    largest_sigmas,
    massive,
    massive_activations,
    outlier_channels,
    residual_stream,
    snr_db,
)

IDS = torch.arange(3, 63).view(3, 20)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_massive_activation_worked_by_hand():
    states = torch.full((4, 8), 0.1)
    states[2, 5], states[0, 1] = -300.0, 90.0
    (found,) = massive(states)
    assert (found.token, found.channel, found.value) == (2, 5, -300) and found.medians == pytest.approx(3000)
    mean = (30 * 0.1 - 300 + 90) / 32
    variance = (30 * (0.1 - mean) ** 2 + (-300 - mean) ** 2 + (90 - mean) ** 2) / 32
    assert found.sigmas == pytest.approx(300 / variance**0.5)
    assert [one.value for one in massive(states, above=50, times_median=100)] == [-300, 90]
    assert massive(states, above=300) == []  # above, not at
    assert massive(states, times_median=3001) == []


def test_massive_activations_are_found_at_their_layer_window_and_position(tl8):
    """A token whose embedding writes a huge channel is massive from the first block on."""
    with torch.no_grad():
        tl8.model.embed_tokens.weight[IDS[1, 4], 7] = 5000.0
    found = massive_activations(tl8, IDS, times_median=500)
    assert {(one.layer, one.window, one.positions) for one in found} == {(layer, 1, (4,)) for layer in range(4)}
    assert all(7 in one.channels and one.largest.token == 4 and one.largest.channel == 7 for one in found)
    assert found[0].largest.value == 5000


def test_positions_are_those_of_the_window_whatever_its_padding(tl8):
    with torch.no_grad():
        tl8.model.embed_tokens.weight[9, 7] = 5000.0
        tl8.model.embed_tokens.weight[0, 3] = 9000.0  # the pad token, which is no fact of the text
    ids = torch.tensor([[0, 0, 0, 5, 9, 6]])
    found = massive_activations(tl8, ids, real=ids > 0, times_median=500)
    assert {one.positions for one in found} == {(4,)} and all(3 not in one.channels for one in found)


def test_the_largest_activation_is_found_where_nothing_is_massive():
    states = torch.tensor([[1.0, -2, 3], [0, -4, 4]])
    found = largest_activation(states)
    assert (found.token, found.channel, found.value, found.medians) == (1, 1, -4, 2)
    assert found.sigmas == pytest.approx(4 / states.std(correction=0).item())
    assert massive(states) == [] and largest_activation(torch.full((2, 3), 300.0)).token == 0
    states = normal(50, 16)
    states[31, 4] = 4e5
    assert largest_activation(states) == massive(states)[0]


def test_the_residual_stream_has_the_largest_of_all_windows_and_counts_what_is_massive_in_each(tl8):
    with torch.no_grad():
        tl8.model.embed_tokens.weight[IDS[1, 4], 7] = 5000.0
        tl8.model.embed_tokens.weight[IDS[2, 9], 8] = -7000.0
    found = residual_stream(tl8, IDS)
    assert list(found) == [f"model.layers.{layer}" for layer in range(4)]
    first = found["model.layers.0"]
    assert (first.window, first.largest.token, first.largest.channel, first.largest.value, first.massive) == (2, 9, 8, -7000, 2)
    with torch.inference_mode():
        states = tl8(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states
    for layer, each in enumerate(found.values()):
        assert each.largest.value == float(states[layer].flatten()[states[layer].abs().argmax()])
        assert each.massive == sum(len(massive(states[layer][window])) for window in range(3))
    masked = residual_stream(tl8, IDS, real=(IDS[2, 9] != IDS))["model.layers.0"]
    assert (masked.window, masked.largest.token, masked.massive) == (1, 4, 1)


def test_outlier_channels_worked_by_hand():
    largest = torch.tensor([1.0, 2, 7, 40, 2])
    assert outlier_channels(largest) == ((2, 3), 20.0, 0.4)
    assert outlier_channels(largest, times_median=10).channels == (3,)
    assert outlier_channels(largest, above=50).channels == ()
    assert outlier_channels(torch.zeros(3)) == ((), 1.0, 0.0)


def test_a_large_gain_of_a_norm_is_an_outlier_channel_of_each_of_its_readers(tl8):
    with torch.no_grad():
        tl8.model.layers[2].input_layernorm.weight[11] = 60.0
    found = {name: outlier_channels(largest, times_median=8).channels for name, largest in largest_inputs(tl8, IDS).items()}
    assert {name for name, channels in found.items() if channels == (11,)} == {f"model.layers.2.self_attn.{part}_proj" for part in "qkv"}
    assert len(found) == 28


def test_snr_worked_by_hand_and_six_decibels_a_bit():
    assert snr_db(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5])) == pytest.approx(20)
    assert snr_db(torch.ones(2), torch.ones(2)) == math.inf
    assert snr_db(torch.zeros(2), torch.ones(2)) == -math.inf
    weight = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) - 0.5
    four, five = (snr_db(weight, dequantize(quantize(weight, Format(bits=bits, group_size=0, scale="float32")))) for bits in (4, 5))
    assert four == pytest.approx(20 * math.log10(15), abs=0.1) and five == pytest.approx(20 * math.log10(31), abs=0.1)


def test_the_largest_weight_in_root_mean_squares():
    assert largest_sigmas(torch.tensor([[3.0, 4.0]])) == pytest.approx(4 / 12.5**0.5)
    assert largest_sigmas(torch.zeros(2, 2)) == 0.0


@pytest.mark.parametrize(
    "format", [Format(group_size=8), Format(group_size=8, symmetric=False), Format("nf4", 4, 8), Format("e2m1", 4, 8, scale="float32")]
)
def test_the_clipped_share_is_that_of_weights_beyond_the_kept_range(format):
    weight = torch.tensor([[1.0, -1, 0.2, 0.1, 0, 0.3, -0.2, -0.1], [0.0] * 8])
    assert clipped_share(weight, quantize(weight, format)) == 0.0
    assert clipped_share(weight, quantize(weight, format, shrink=0.5)) == 2 / 16


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), bits=st.integers(2, 8), symmetric=st.booleans())
def test_nothing_is_clipped_with_the_whole_range(seed, bits, symmetric):
    weight = normal(4, 32, seed=seed) ** 3
    assert clipped_share(weight, quantize(weight, Format(bits=bits, group_size=16, symmetric=symmetric))) == 0.0


def test_the_floor_rule_of_shared_exponents_clips_and_the_ceil_rule_does_not():
    weight = torch.tensor([[7.9] + [1.0] * 31])  # floor gives 2^0: 6 is the largest
    format = Format("e2m1", 4, 32, scale="e8m0")
    assert clipped_share(weight, quantize(weight, format)) == 1 / 32
    assert clipped_share(weight, quantize(weight, format._replace(shared_exponent="ceil"))) == 0.0


def test_no_window_is_refused(tl8):
    with pytest.raises(ValueError, match="at least one window"):
        massive_activations(tl8, IDS[:0])
    with pytest.raises(ValueError, match="at least one window"):
        largest_inputs(tl8, IDS[:0])
