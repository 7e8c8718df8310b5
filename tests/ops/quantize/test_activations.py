"""What layers read, rounded."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize.activations import Activations, attach, calibrate, quantize_activations, watch_inputs
from assay.ops.quantize.grid import Format, dequantize, quantize

IDS = torch.arange(3, 103).view(5, 20)
DOWN = "model.layers.1.mlp.down_proj"


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_codes_worked_by_hand():
    row = torch.tensor([[-7.5, 0.4, 1.6, 7.5]])  # s = 1; codes -8, 0, 2, 7
    assert quantize_activations(row, Activations("int4")).tolist() == [[-8, 0, 2, 7]]
    row = torch.tensor([[-1.0, 0.4, 14.0]])  # s = 1, z = -7
    assert quantize_activations(row, Activations("int4", symmetric=False)).tolist() == [[-1, 0, 14]]
    static = Activations("int4", "tensor", scale=torch.tensor([2.0]))
    assert quantize_activations(torch.tensor([[3.1, 100, -100, 0.9]]), static).tolist() == [[4, 14, -16, 0]]
    halved = quantize_activations(torch.tensor([[-15.0, 1, 2, 15]]), Activations("int4", clip=0.5))
    assert halved.tolist() == [[-8, 1, 2, 7]]


def test_fp8_saturates_at_448_and_keeps_a_nan_to_its_own_token():
    static = Activations("fp8_e4m3", "tensor", scale=torch.tensor([1.0]))
    found = quantize_activations(torch.tensor([[448.0, 449, 464, 1000, -1000, torch.nan]]), static)
    assert found[0, :5].tolist() == [448, 448, 448, 448, -448] and found[0, 5].isnan()
    rows = torch.tensor([[1.0, torch.nan], [1.0, 0.5]])
    for how in (Activations("fp8_e4m3"), Activations(), Activations(symmetric=False)):
        found = quantize_activations(rows, how)
        assert found[0].isnan().any() and found[1, 0] == pytest.approx(1, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), symmetric=st.booleans(), bits=st.sampled_from([4, 8]), size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
def test_each_token_is_rounded_as_a_row_of_a_weight_is(seed, symmetric, bits, size):
    values = normal(6, 32, seed=seed) * size
    values[2] = 0
    found = quantize_activations(values.view(2, 3, 32), Activations(f"int{bits}", symmetric=symmetric))
    expected = dequantize(quantize(values, Format(bits=bits, group_size=-1, symmetric=symmetric, scale="float32")))
    step = (values.amax(1) - values.amin(1)) / (2**bits - 1)
    assert torch.allclose(found.view(6, 32), expected, atol=float(step.max()) * 1e-4)
    assert found.isfinite().all() and not found.view(6, 32)[2].any()


@pytest.mark.parametrize("how", [Activations(), Activations(symmetric=False), Activations("fp8_e4m3"), Activations("int4")])
def test_a_token_of_zeros_and_16_bit_inputs_give_no_nan_and_keep_their_dtype(how):
    values = torch.cat([torch.zeros(1, 8), normal(1, 8)]).to(torch.float16)
    found = quantize_activations(values, how)
    assert found.dtype == torch.float16 and found.isfinite().all() and not found[0].any()
    assert quantize_activations(found, how).allclose(found, rtol=0.1)


def test_a_token_does_not_depend_on_its_neighbours():
    values = normal(5, 16)
    alone = torch.cat([quantize_activations(values[i : i + 1], Activations()) for i in range(5)])
    assert torch.equal(quantize_activations(values, Activations()), alone)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_range_is_that_of_real_tokens_whatever_the_padding(tl8, side):
    long, short = IDS[0, :12], IDS[1, :5]
    ids, real = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.bool)
    at = slice(7, 12) if side == "left" else slice(0, 5)
    ids[0], real[0], ids[1, at], real[1, at] = long, True, short, True
    for keep in (1.0, 0.99):
        padded = calibrate(tl8, [DOWN], ids, Activations(symmetric=False), real=real, keep=keep)[DOWN]
        if keep == 1.0:
            ones = [calibrate(tl8, [DOWN], text[None], Activations(symmetric=True))[DOWN].scale for text in (long, short)]
            symmetric = calibrate(tl8, [DOWN], ids, Activations(), real=real)[DOWN].scale
            assert torch.allclose(symmetric, torch.maximum(*ones), rtol=1e-5)
        found = []
        for text in (long, short):
            watch_inputs(tl8, [DOWN], text[None], lambda _, values, found=found: found.append(values))
        values = torch.cat(found)
        assert len(values) == 17
        share = 1.0 if keep == 1 else values.abs().flatten().kthvalue(-(-99 * values.numel() // 100)).values / values.abs().max()
        assert padded.scale.item() == pytest.approx(float((values.max() - values.min()) / 255 * share), rel=0.01)


def test_a_static_range_leaves_calibration_in_range_and_rounds_to_within_half_a_step(tl8):
    seen = []
    watch_inputs(tl8, [DOWN], IDS, lambda _, values: seen.append(values))
    values = torch.cat(seen)
    for how in (Activations(), Activations(symmetric=False), Activations("int4", symmetric=False)):
        found = calibrate(tl8, [DOWN], IDS, how)[DOWN]
        assert ((quantize_activations(values, found) - values).abs() <= found.scale * 0.5 * (1 + 1e-3)).all()
    rounded = quantize_activations(values, calibrate(tl8, [DOWN], IDS, Activations("fp8_e4m3"))[DOWN])
    assert ((rounded - values).abs() <= values.abs() / 16 + 1e-3).all()


@torch.no_grad()
def test_attached_layers_compute_with_rounded_inputs_until_removed(tl8):
    plain = tl8(IDS).logits
    expected = []
    watch_inputs(tl8, [DOWN], IDS[:1], lambda _, values: expected.append(values))
    handles = attach(tl8, {DOWN: Activations("int4")})
    outputs = []
    end = tl8.get_submodule(DOWN).register_forward_hook(lambda module, _, output: outputs.append(output))
    rounded = tl8(IDS[:1]).logits
    end.remove()
    assert not torch.allclose(rounded, plain[:1], atol=0.01)
    weight = tl8.get_submodule(DOWN).weight
    assert torch.allclose(outputs[0][0], quantize_activations(expected[0], Activations("int4")) @ weight.T, atol=1e-4)
    for handle in handles:
        handle.remove()
    assert torch.equal(tl8(IDS).logits, plain)


def test_more_bits_are_nearer(tl8):
    names = [name for name, module in tl8.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name]
    with torch.no_grad():
        plain, errors = tl8(IDS).logits, []
        for format in ("int8", "int4"):
            handles = attach(tl8, dict.fromkeys(names, Activations(format)))
            errors.append(float((tl8(IDS).logits - plain).square().mean()))
            for handle in handles:
                handle.remove()
    assert 0 < errors[0] < errors[1] / 20


def test_what_cannot_be_computed_is_refused_before_anything_is_attached(tl8):
    values = torch.ones(1, 4)
    for how, said in (
        (Activations(per="tensor"), "have no scale; calibrate"),
        (Activations(per="tensor", symmetric=False, scale=torch.ones(1)), "have no zero"),
        (Activations("fp8_e4m3", symmetric=False), "no zero point"),
        (Activations(clip=0.0), "clip=0.0 is no share"),
        (Activations("int5"), "'int5' per 'token' are not known"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=said):
            quantize_activations(values, how)
    with pytest.raises(ValueError, match=r"layers\.9\.x is no nn\.Linear"):
        attach(tl8, {DOWN: Activations(), "layers.9.x": Activations()})
    assert not tl8.get_submodule(DOWN)._forward_pre_hooks
    with pytest.raises(ValueError, match="at least one window"):
        calibrate(tl8, [DOWN], IDS[:0], Activations())
    with pytest.raises(ValueError, match="no real token"):
        calibrate(tl8, [DOWN], IDS, Activations(), real=torch.zeros_like(IDS, dtype=torch.bool))
    broken = copy.deepcopy(tl8)
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"input of model\.layers\.1\.mlp\.down_proj has values that are NaN"):
        calibrate(broken, [DOWN], IDS, Activations())
    with pytest.raises(ValueError, match="keep=2 is no share"):
        calibrate(tl8, [DOWN], IDS, Activations(), keep=2)
