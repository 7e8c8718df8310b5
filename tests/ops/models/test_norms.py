"""What a norm multiplies by is found by computing it."""

import pytest
import torch
from torch import nn

from assay.ops.models.norms import norm_offset


class Thrice(torch.nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) * 3


def test_norms_are_told_apart_by_what_they_compute(tl8, make_decoder):
    assert norm_offset(tl8.model.norm.bfloat16()) == 0
    assert norm_offset(make_decoder("gemma3", num_hidden_layers=1).model.norm) == 1
    with pytest.raises(ValueError, match=r"final \(LayerNorm\) is no RMS norm"):
        norm_offset(nn.LayerNorm(8), "final")


def test_a_norm_that_takes_the_mean_off_is_one_where_that_is_asked(tl8):
    norm = nn.LayerNorm(8)
    nn.init.uniform_(norm.bias)
    kept = norm.bias.clone()
    assert norm_offset(norm, centred=True) == 0 == norm_offset(tl8.model.norm, centred=True)
    assert torch.equal(norm.bias, kept)
    with pytest.raises(ValueError, match=r"Thrice\) is no norm with a gain of w or 1 \+ w"):
        norm_offset(Thrice(8), centred=True)
