"""The step ``pack``: 2:4 weights in 9/16 of their bytes and int8 codes in 5/8, the same logits, and what is not 2:4 refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from assay.kernels import native
from assay.kernels.engine import open_runner
from assay.ops.cost.bytes import artifact_bytes
from assay.ops.cost.reads import reads
from assay.ops.models.checkpoint import load_model, weights_path
from assay.ops.models.experts import weights
from assay.ops.quantize import by_layer
from assay.ops.quantize.read import read_weights
from assay.ops.quantize.semi_structured import SemiStructuredCodes
from assay.schemas.pruning import Pack, PruneDepth, PruneWeights
from assay.schemas.rounding import Inputs, Quantize


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
    codes = done(Quantize(format="int4"), sparse, "codes").out
    with pytest.raises(ValueError, match="the codes are int4, and of rounded weights int8 alone"):
        done(Pack(), codes, "packed codes")
    split = done(Quantize(method="llm_int8"), sparse, "split").out
    with pytest.raises(ValueError, match="stored as int8 with columns in bfloat16, which is not packed as 2:4"):
        done(Pack(), split, "packed split")
    with pytest.raises(ValueError, match="it is stored as 2:4, which is not packed as 2:4"):
        done(Pack(), done(Pack(), sparse, "once").out, "twice")


INT8 = [
    Quantize(format="int8", group_size=32),
    Quantize(format="int8", group_size=-1, symmetric=False, method="gptq", inputs=Inputs(format="int8", per="tensor")),
    Quantize(format="int8", group_size=32, embeddings="quantize", head="quantize"),
]


@pytest.mark.parametrize("step", INT8, ids=["symmetric", "asymmetric, with rounded inputs", "with the embedding"])
def test_the_same_int8_codes_in_five_eighths_of_the_bytes_of_codes(done, sparse, ids, engine, close, step):
    rounded = done(step, sparse, "rounded").out
    made = done(Pack(), rounded)
    before, after = read_weights(rounded).packed, read_weights(made.out).packed
    blocks = {name: each for name, each in after.items() if isinstance(each, SemiStructuredCodes)}
    assert blocks.keys() == weights(load_model(sparse)).keys() and after.keys() == before.keys()
    assert all(each.quantized().codes.equal(before[name].codes) for name, each in blocks.items())
    assert all(torch.equal(each.dense(), before[name].dense()) for name, each in after.items())
    whole, packed = artifact_bytes(rounded), artifact_bytes(made.out)
    assert packed.code_bytes == whole.code_bytes // 2 and packed.weights == whole.weights
    places = whole.code_bytes // 8
    assert packed.scale_bytes - whole.scale_bytes == places  # so that codes and places are 10/16 of the codes before
    assert reads(rounded).weight_bytes - reads(made.out).weight_bytes == whole.code_bytes * 6 // 16
    told = by_layer.read(made.out)
    assert {each["form"] for name, each in told.items() if name in blocks} == {"2:4 int8"} and made.summary["bits_per_weight"] < 6.6
    assert close(engine(made.out), engine(rounded))
    assert "int8 from 2:4 int8" in open_runner(made.out).path or not native.levels()


def test_what_int8_codes_and_places_come_to(done, sparse):
    made = done(Pack(), done(Quantize(format="int8", group_size=32), sparse, "rounded").out)
    assert made.summary["bits_per_weight"] == artifact_bytes(made.out).quantized_bits_per_weight == 8 / 2 + 1 + 16 / 32
    assert {each["bits"] for each in by_layer.read(made.out).values()} == {5.5}


def test_what_was_packed_is_not_changed(done, sparse):
    packed = done(Pack(), sparse, "packed").out
    with pytest.raises(ValueError, match="its parent is already quantized"):
        done(PruneDepth(layers=1, score="random"), packed, "shorter")
