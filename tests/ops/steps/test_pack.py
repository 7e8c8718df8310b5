"""The step ``pack``: 2:4 weights in 9/16 of their bytes, the same logits, and what is not 2:4 refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from assay.ops.cost.bytes import artifact_bytes
from assay.ops.models.checkpoint import load_model, weights_path
from assay.ops.models.experts import weights
from assay.schemas.pruning import Pack, PruneDepth, PruneWeights
from assay.schemas.rounding import Quantize


@pytest.fixture
def sparse(done, small):
    return done(PruneWeights(method="magnitude", pattern="2:4"), small, "sparse").out


def test_the_same_weights_in_nine_sixteenths_of_the_bytes(done, sparse, ids, engine, close):
    made = done(Pack(), sparse)
    before, after = load_model(sparse), load_model(made.out)
    assert all(torch.equal(weight, weights(after)[name]) for name, weight in weights(before).items())
    dense, packed = artifact_bytes(sparse), artifact_bytes(made.out)
    assert packed.code_bytes + packed.scale_bytes == dense.code_bytes * 9 // 16
    assert packed.weights == dense.weights and packed.quantized_bits_per_weight == made.summary["bits_per_weight"] == 9.0
    assert weights_path(made.out) == "dequantized"  # no kernel of ours reads it
    assert close(engine(made.out), load_model(sparse, dtype=torch.float32)(ids).logits[0])
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(made.out)


def test_what_is_not_two_of_four_or_already_codes_is_refused(done, small, sparse):
    with pytest.raises(ValueError, match=r"weights that are not zero.*Prune with the pattern 2:4 first"):
        done(Pack(), small, "dense")
    codes = done(Quantize(format="int8"), sparse, "codes").out
    with pytest.raises(ValueError, match="pack changes dense weights, but its parent is already quantized"):
        done(Pack(), codes, "again")


def test_what_was_packed_is_not_changed(done, sparse):
    packed = done(Pack(), sparse, "packed").out
    with pytest.raises(ValueError, match="its parent is already quantized"):
        done(PruneDepth(layers=1, score="random"), packed, "shorter")
