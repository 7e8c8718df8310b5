"""Number types: every code and its value."""

import pytest
import torch

from assay.ops.quantize.elements import ELEMENTS, FLOAT8, decode, encode, nf4_values

CODES = {
    "int": torch.arange(-8, 8), "ternary": torch.tensor([-1, 0, 1]), "e2m1": torch.arange(16), "nf4": torch.arange(16),
    "e4m3": torch.arange(256), "e5m2": torch.arange(256),
}  # fmt: skip


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_code_of_a_value_is_the_code_that_has_it(element):
    codes = CODES[element].to(torch.uint8).view(torch.int8) if element in FLOAT8 else CODES[element].to(torch.int8)
    values = decode(codes, element)
    kept = values.isfinite()
    assert torch.equal(encode(values[kept], element), codes[kept])


@pytest.mark.parametrize("element", ["e2m1", "nf4", "e4m3", "e5m2"])
def test_the_nearest_value_is_taken(element):
    codes = CODES[element].to(torch.uint8).view(torch.int8) if element in FLOAT8 else CODES[element].to(torch.int8)
    values = decode(codes, element)
    values = values[values.isfinite()]
    numbers = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * values.max() / 3
    nearest = (numbers.clamp(-values.max(), values.max())[:, None] - values).abs().amin(dim=1)
    found = (decode(encode(numbers, element), element) - numbers.clamp(-values.max(), values.max())).abs()
    assert torch.allclose(found, nearest, rtol=1e-5, atol=1e-7)


def test_small_floats_saturate_whatever_the_build_and_nan_stays_nan():
    """Left to the cast, 464 becomes NaN on one build and 448 on another."""
    found = decode(encode(torch.tensor([448.0, 449, 464, 1000, -1000, torch.inf]), "e4m3"), "e4m3")
    assert found.tolist() == [448, 448, 448, 448, -448, 448]
    assert decode(encode(torch.tensor([57_344.0, 1e6, -torch.inf]), "e5m2"), "e5m2").tolist() == [57_344, 57_344, -57_344]
    for element in FLOAT8:
        assert decode(encode(torch.tensor([torch.nan]), element), element).isnan().all()


def test_ties_of_e2m1_go_to_the_even_code():
    numbers = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 7.0])
    assert decode(encode(numbers, "e2m1"), "e2m1").tolist() == [0, 1, 1, 2, 2, 4, 4, 0, -4, 6]


def test_normal_floats_are_those_of_the_paper():
    """The list of appendix E, to the digits that float32 has; asymmetric, with an exact zero."""
    expected = [
        -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524,
        0.44070983, 0.562617, 0.72295684, 1.0,
    ]  # fmt: skip
    assert nf4_values() == pytest.approx(expected, abs=1e-6)
    assert nf4_values()[7] == 0


def test_an_unknown_element_is_refused():
    with pytest.raises(ValueError, match="the element 'e3m0' is none of int, ternary"):
        encode(torch.ones(1), "e3m0")
