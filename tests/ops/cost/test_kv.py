"""Keys and values in bytes: the published figures, in the units that they really are in."""

from fractions import Fraction

import pytest

from assay.ops.cost.bytes import kv_bytes_per_token
from assay.ops.cost.kv import CONTEXT_128K, crossover_context, kept, kv_bytes_at, largest_context, mla_bytes_per_token, shared_bits

GIB = 2**30
KIVI = shared_bits(4, group=32)


def test_k01_70b_takes_320_kib_a_token_and_8b_128():
    assert kv_bytes_at(80, 8, 128) == 320 * 1024 == kv_bytes_per_token(80, 8, 128, "bfloat16")
    assert kv_bytes_at(32, 8, 128) == 128 * 1024 == kv_bytes_per_token(32, 8, 128, "bfloat16")


def test_k01_128k_of_context_are_40_and_16_gib_not_gb():
    """The published 40 and 16 "GB" are GiB: in units of 10⁹ bytes they are 42.9 and 17.2."""
    for layers, gib, gb in ((80, 40, 42.95), (32, 16, 17.18)):
        whole = kv_bytes_at(layers, 8, 128) * CONTEXT_128K
        assert whole == gib * GIB and whole / 1e9 == pytest.approx(gb, abs=0.01)
        assert kv_bytes_at(layers, 8, 128, 8) * CONTEXT_128K == gib / 2 * GIB


def test_k01_kivi_at_4_bits_has_a_quarter_of_metadata_and_saves_3_2_times():
    assert KIVI == 5 and Fraction(1, 4) == KIVI / 4 - 1 and Fraction(16, 5) == 16 / KIVI
    assert kv_bytes_at(80, 8, 128, KIVI) * CONTEXT_128K == 12.5 * GIB
    assert kv_bytes_at(32, 8, 128, KIVI) * CONTEXT_128K == 5 * GIB


def test_k01_a_quarter_of_kivi_is_3_1_gib():
    assert kept(kv_bytes_at(80, 8, 128, KIVI) * CONTEXT_128K, 0.25) / GIB == pytest.approx(3.125)
    with pytest.raises(ValueError, match="share=0"):
        kept(1.0, 0)


def test_k01_mla_is_8_6_gib_and_the_published_8_8_is_its_68_6_kib_a_token_rounded_up_to_70():
    """61 layers of a latent of 512 and a rotated key of 64: 70,272 bytes a token are 70 kB or 68.6 KiB; 70 KiB would be 8.75 GiB."""
    token = mla_bytes_per_token(61, 512, 64)
    assert token == 70_272
    assert token * CONTEXT_128K / GIB == pytest.approx(8.58, abs=0.01)
    assert 70 * 1024 * CONTEXT_128K / GIB == 8.75


def test_k02_kv_passes_the_weights_near_40k_only_for_several_texts_and_at_431k_for_one():
    """The published 40 K of the 70B is not of one text in 16 bits; it is of 11 texts, or of 3 with weights in 4 bits."""
    token = kv_bytes_at(80, 8, 128)
    assert crossover_context(141.1e9, token) == pytest.approx(430_600, rel=1e-3)
    assert crossover_context(141.1e9, token, batch=11) == pytest.approx(39_145, rel=1e-3)
    assert crossover_context(39.8e9, token, batch=3) == pytest.approx(40_487, rel=1e-3)


@pytest.mark.parametrize(
    ("layers", "weights", "bits", "tokens"), [(32, 16.06e9, 16, 74_079), (32, 16.06e9, 8, 148_159), (80, 141.1e9, 16, 0)]
)
def test_the_context_that_fits_into_24_gib_beside_the_weights(layers, weights, bits, tokens):
    found = largest_context(24 * GIB, weight_bytes=weights, kv_bytes_per_token=kv_bytes_at(layers, 8, 128, bits))
    assert found == pytest.approx(tokens, abs=1)


def test_impossible_formats_and_batches_are_refused():
    with pytest.raises(ValueError, match="bits=0"):
        shared_bits(0, group=32)
    with pytest.raises(ValueError, match="batch=0"):
        crossover_context(1.0, 1.0, batch=0)
