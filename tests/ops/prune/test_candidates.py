"""Shapes to try, from a model: its family is read off its weights, and candidates meet the budget when they are cut."""

import pytest
import torch

from assay.ops.models import structure
from assay.ops.prune.candidates import candidates, family_of
from assay.ops.prune.shapes import Shape, parameters
from assay.ops.prune.width import Kept, cut

WINDOWS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(0))
SMALL = Shape(layers=1, kv_groups=1, ffn=16, hidden=16)


@pytest.mark.parametrize(
    "kind", ["llama", "llama with yarn, bias and one key head", "mistral with a window", "qwen2 with a bias", "qwen3", "gemma3"]
)
def test_the_family_that_is_read_counts_every_weight(kind, make_decoder):
    model = make_decoder(kind)
    sizes = structure.shape_numbers(model)
    full = Shape(sizes["layers"], sizes["kv_heads"], sizes["intermediate_size"], sizes["hidden_size"])
    assert parameters(full, family_of(model)) == sum(each.numel() for each in model.parameters())


def test_candidates_meet_the_budget_and_can_be_cut(tl8):
    before = sum(each.numel() for each in tl8.parameters())
    found = candidates(tl8, WINDOWS, before * 8 // 10, best=3, divisors=SMALL)
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True) and len(found) == 3
    shape = found[0].shape
    cut(tl8, Kept([list(range(shape.kv_groups))] * 4, None, [list(range(shape.ffn))] * 4, list(range(shape.hidden))))
    same_depth = parameters(shape._replace(layers=4), family_of(tl8))
    assert sum(each.numel() for each in tl8.parameters()) == same_depth and found[0].parameters <= before * 8 // 10


def test_a_budget_that_nothing_meets_is_refused(tl8):
    with pytest.raises(ValueError, match="no shape has at most 10 parameters"):
        candidates(tl8, WINDOWS, 10, best=3, divisors=SMALL)
