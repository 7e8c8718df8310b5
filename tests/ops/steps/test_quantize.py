"""The step ``quantize`` as an experiment meets it: every method and format, stored, opened and run as what was rounded; what cannot be is refused first."""

import json
import math
import re
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.ops.apply import apply
from assay.ops.models.checkpoint import load_model
from assay.ops.models.dense import weight_files
from assay.ops.quantize import by_layer
from assay.ops.steps.quantize import entry
from assay.schemas.rounding import Quantize

INT8, INT4 = {"format": "int8", "symmetric": False}, {"format": "int4", "symmetric": False}
FP8 = {"format": "fp8_e4m3"}
INDEX = {"act_order": "index"}

# name → (the step, how it is stored)
OURS, THEIRS = "assay", "compressed-tensors"
WAYS = {
    "int8": ({"format": "int8"}, THEIRS),
    "int4 in groups": ({"format": "int4", "group_size": 32}, THEIRS),
    "int3 a row": ({"format": "int3", "group_size": -1}, THEIRS),
    "int2, asymmetric": ({"format": "int2", "group_size": 32, "symmetric": False}, THEIRS),
    "int4 a weight, asymmetric": ({"format": "int4", "group_size": "tensor", "symmetric": False}, THEIRS),
    "fp8 a row": ({"format": "fp8_e4m3"}, THEIRS),
    "fp8 a weight": ({"format": "fp8_e4m3", "group_size": "tensor"}, THEIRS),
    "fp8 in blocks": ({"format": "fp8_e4m3", "group_size": "block"}, THEIRS),
    "fp8 e5m2": ({"format": "fp8_e5m2"}, OURS),
    "mxfp8": ({"format": "mxfp8"}, THEIRS),
    "mxfp4": ({"format": "mxfp4", "shared_exponent": "even"}, THEIRS),
    "nvfp4": ({"format": "nvfp4"}, THEIRS),
    "nf4": ({"format": "nf4"}, OURS),
    "nf4, nested": ({"format": "nf4", "nested": True}, OURS),
    "ternary": ({"format": "ternary"}, OURS),
    "int4, range by mse": ({"format": "int4", "range": "mse"}, THEIRS),
    "nvfp4, range by mse": ({"format": "nvfp4", "range": "mse"}, THEIRS),
    "int3, a share": ({"format": "int3", "range": "percentile", "keep_permille": 990}, THEIRS),
    "int3, range by outputs": ({"format": "int3", "range": "output_mse"}, THEIRS),
    "hqq int4": ({"method": "hqq", "format": "int4", "symmetric": False}, THEIRS),
    "hqq int4 a weight": ({"method": "hqq", "format": "int4", "group_size": "tensor", "symmetric": False}, THEIRS),
    "hqq fp8": ({"method": "hqq", "format": "fp8_e4m3"}, THEIRS),
    "hqq nf4": ({"method": "hqq", "format": "nf4"}, OURS),
    "gptq int4": ({"method": "gptq", "format": "int4"}, THEIRS),
    "gptq int3, in order": ({"method": "gptq", "format": "int3", "gptq": {"act_order": "none"}}, THEIRS),
    "gptq int4, groups in another order": ({"method": "gptq", "format": "int4", "group_size": 32, "gptq": INDEX}, OURS),
    "gptq int4, asymmetric, in another order": ({"method": "gptq", "format": "int4", "symmetric": False, "gptq": INDEX}, OURS),
    "gptq mxfp4, groups in another order": ({"method": "gptq", "format": "mxfp4", "gptq": INDEX}, OURS),
    "gptq nf4, nested, in another order": ({"method": "gptq", "format": "nf4", "nested": True, "gptq": INDEX}, OURS),
    "gptq fp8 in blocks": ({"method": "gptq", "format": "fp8_e4m3", "group_size": "block"}, THEIRS),
    "gptq nvfp4": ({"method": "gptq", "format": "nvfp4"}, THEIRS),
    "gptq int3, range by outputs": ({"method": "gptq", "format": "int3", "range": "output_mse"}, THEIRS),
    "gptq with the ends": ({"method": "gptq", "format": "int4", "embeddings": "quantize", "head": "quantize"}, THEIRS),
    "llm_int8": ({"method": "llm_int8"}, OURS),
    "e8": ({"method": "e8"}, OURS),
    "mixed integers": ({"mixed": {"millibits": 4500}}, THEIRS),
    "mixed floats": ({"mixed": {"millibits": 6000, "formats": ("nvfp4", "fp8_e4m3")}}, THEIRS),
    "mixed, some ours": ({"mixed": {"millibits": 6500, "formats": ("nf4", "fp8_e4m3")}}, OURS),
    "gptq mixed": ({"method": "gptq", "mixed": {"millibits": 3500}}, THEIRS),
    "int8, int8 inputs": ({"format": "int8", "group_size": -1, "inputs": INT8}, THEIRS),
    "int8 in groups, int8 inputs": ({"format": "int8", "symmetric": False, "inputs": INT8}, THEIRS),
    "int8, static int8 inputs": ({"format": "int8", "group_size": -1, "inputs": {"format": "int8", "per": "tensor"}}, THEIRS),
    "int8, static asymmetric inputs": ({"format": "int8", "group_size": -1, "inputs": {**INT8, "per": "tensor"}}, OURS),
    "int8, clipped inputs": ({"format": "int8", "group_size": -1, "inputs": {**INT8, "clip_pct": 90}}, OURS),
    "int4, int4 inputs": ({"format": "int4", "group_size": -1, "inputs": INT4}, THEIRS),
    "fp8, fp8 inputs": ({"format": "fp8_e4m3", "inputs": FP8}, THEIRS),
    "fp8, static fp8 inputs": ({"format": "fp8_e4m3", "group_size": "tensor", "inputs": {**FP8, "per": "tensor"}}, THEIRS),
    "mxfp4, int8 inputs": ({"format": "mxfp4", "inputs": INT8}, THEIRS),
    "nf4, int8 inputs": ({"format": "nf4", "inputs": INT8}, OURS),
    "gptq int4, int8 inputs": ({"method": "gptq", "format": "int4", "inputs": INT8}, THEIRS),
    "mixed, int8 inputs": ({"mixed": {"millibits": 5500}, "inputs": INT8}, THEIRS),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", WAYS)
def test_what_is_stored_opens_and_runs_as_what_was_rounded(name, wide, done, ids, engine, close):
    given, layout = WAYS[name]
    step = Quantize.model_validate(given)
    made = done(step, wide)
    assert torch.equal(load_model(made.out)(ids).logits, made.logits)
    dense = load_model(made.out, dtype=torch.float32)(ids).logits[0]
    found = engine(made.out)
    # An activation that lies on the edge of two codes may fall to either side when a sum is taken in another order: a few of many thousands.
    assert close(found, dense) or (step.inputs and (found - dense).abs().mean() < 0.02 * dense.abs().mean()), name
    assert made.summary["layout"] == layout
    assert json.loads(json.dumps(made.summary, allow_nan=False)) == made.summary
    assert list(by_layer.read(made.out)) == [
        f"model.layers.0.{part}" for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                                              "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip


@torch.no_grad()
def test_additive_codes_open_and_run_as_what_was_rounded(make_llama, saved, done, ids, engine, close):
    made = done(Quantize(method="additive"), saved(make_llama(ffn=64, layers=1)))
    assert torch.equal(load_model(made.out)(ids).logits, made.logits) and made.summary["forms"] == ["additive2x8"]
    assert close(engine(made.out), load_model(made.out, dtype=torch.float32)(ids).logits[0])


ONE_OF_EACH = [
    {"format": "nvfp4", "inputs": {"format": "int8", "per": "tensor"}}, {"format": "int3", "range": "output_mse"}, {"mixed": {"millibits": 4500}},
    {"method": "hqq", "format": "int4"}, {"method": "gptq", "format": "nf4", "nested": True}, {"method": "llm_int8"}, {"method": "e8"},
]  # fmt: skip


@pytest.mark.parametrize("given", ONE_OF_EACH, ids=lambda given: entry(Quantize.model_validate(given)))
def test_two_runs_write_the_same_bytes_and_name_neither_path_nor_host(given, small, done):
    step = Quantize.model_validate(given)
    one, other = ({path.name: path.read_bytes() for path in done(step, small, name, seed=3).out.iterdir()} for name in ("one", "other"))
    assert one == other and {"config.json", "README.md", "layers.json", "tokenizer.json"} <= set(one)
    host = socket.gethostname().encode()
    for name, content in one.items():
        text = content[: 8 + int.from_bytes(content[:8], "little")] if name.endswith(".safetensors") else content
        assert str(small.parent).encode() not in text and b"/tmp" not in text and (len(host) < 4 or host not in text), name


@torch.no_grad()
def test_rounded_integer_inputs_run_in_the_engine_to_within_a_part_of_what_rounding_them_does(wide, done, ids, engine):
    """The largest input of a token is 127.5 steps of a symmetric range: if negative it is -127 or -128, whichever way a sum was rounded."""
    step = Quantize(format="int8", group_size=-1, inputs={"format": "int8"})
    out = done(step, wide).out
    model = load_model(out, dtype=torch.float32)
    rounded = model(ids).logits[0]
    for module in model.modules():
        module._forward_pre_hooks.clear()
    effect = (model(ids).logits[0] - rounded).abs().mean()
    assert effect > 0 and (engine(out) - rounded).abs().mean() < effect / 2


# --- embedding and head ----------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("given", "form"),
    [({"format": "nf4"}, "nf4"), ({"format": "mxfp4"}, "mxfp4"), ({"format": "nf4", "nested": True}, "nf4"),
     ({"format": "ternary"}, "ternary"), ({"format": "fp8_e4m3", "group_size": "block"}, "fp8_e4m3"), ({"format": "nvfp4"}, "nvfp4"),
     ({"format": "int4", "group_size": "tensor", "symmetric": False}, "int4")],
    ids=str,
)  # fmt: skip
def test_embedding_and_head_of_every_policy_and_format_are_what_was_rounded(given, form, tied, make_llama, saved, done, ids, engine, close):
    parent = saved(make_llama(hidden=128, ffn=128, layers=1, kv_heads=4, tied=tied))
    policies = [("skip", "skip"), ("quantize", "quantize"), ("skip", "untie"), ("quantize", "untie")]
    if not tied:
        policies = [("quantize", "skip"), ("skip", "quantize"), ("quantize", "quantize")]
    for embeddings, head in policies:
        made = done(Quantize.model_validate({**given, "embeddings": embeddings, "head": head}), parent, f"{embeddings}-{head}")
        model = load_model(made.out)
        assert torch.equal(model(ids).logits, made.logits), (embeddings, head)
        wide = load_model(made.out, dtype=torch.float32)
        assert close(engine(made.out), wide(ids).logits[0]), (embeddings, head)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (tied and head != "untie")
        before = load_model(parent)
        same = torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
        assert same == (embeddings == "skip")  # a head that is rounded leaves the embedding alone
        stored = load_file(*weight_files(made.out))
        assert any(name.startswith("lm_head.") for name in stored) == (not tied or head == "untie")
        assert made.summary["forms"] == [form]


# --- experts ---------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(make_decoder, saved):
    return saved(make_decoder("mixtral with a window", num_hidden_layers=2))


@torch.no_grad()
@pytest.mark.parametrize(
    "given",
    [{"format": "int4", "group_size": 32}, {"format": "nf4", "group_size": 32}, {"method": "hqq", "format": "int4", "group_size": 32},
     {"method": "gptq", "format": "mxfp4"}, {"method": "e8"},
     {"format": "int4", "group_size": 32, "range": "output_mse"}, {"group_size": 32, "mixed": {"millibits": 5500}}],
    ids=lambda given: f"{entry(Quantize.model_validate(given))} {given.get('format', '')}",
)  # fmt: skip
def test_experts_are_rounded_although_they_are_no_linear_layers_and_come_back(given, mixture, done, ids, engine, close):
    made = done(Quantize.model_validate(given), mixture)
    assert made.summary["coverage"] >= 0.95
    assert sum(".experts." in name for name in by_layer.read(made.out)) == 2 * 4 * 3
    assert torch.equal(load_model(made.out)(ids).logits, made.logits)
    assert close(engine(made.out), load_model(made.out, dtype=torch.float32)(ids).logits[0])


def test_a_method_that_does_not_see_the_inputs_of_experts_is_refused_and_leaves_no_model_of_rounded_attention_alone(
    mixture, done, tmp_path
):
    with pytest.raises(
        ValueError, match=r"the pass reaches 24,576 of 172,544 weights .* at least 95% was expected. Missed, .*experts.gate_up_proj"
    ):
        done(Quantize(method="llm_int8", group_size=32), mixture)
    assert not any((tmp_path / "out").iterdir())


def test_rounded_inputs_of_experts_are_refused_before_anything_is_rounded(mixture, done, tmp_path):
    with pytest.raises(ValueError, match=r"the inputs of experts \(model.layers.0.mlp.experts\) cannot be rounded: .* leave out inputs"):
        done(Quantize(format="int8", group_size=-1, inputs={"format": "int8"}), mixture)
    assert not any((tmp_path / "out").iterdir())


# --- what is said of it ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "bits"),
    [({"format": "int4", "group_size": "tensor", "symmetric": False}, 4 + 7 * 24 / (4 * 128 * 128 + 3 * 128 * 256)), ({"format": "nf4"}, 4.5), ({"format": "mxfp4"}, 4.25), ({"format": "int4", "group_size": 128}, 4.125), ({"format": "nvfp4"}, None)],
    ids=str,
)  # fmt: skip
def test_bits_of_a_weight_are_the_bytes_in_the_file(given, bits, wide, done):
    """Packed bytes counted as weights, or scales left out, make up other numbers."""
    made = done(Quantize.model_validate(given), wide)
    parts = {name: tensor for name, tensor in load_file(*weight_files(made.out)).items() if "_proj." in name}
    size = sum(tensor.nbytes for name, tensor in parts.items() if not name.endswith("weight_shape"))
    weights = 4 * 128 * 128 + 3 * 128 * 256
    assert made.summary["packed_weights"] == weights and made.summary["packed_bytes"] == size
    assert made.summary["bits_per_weight"] == pytest.approx(bits or 4.5 + 7 * 32 / weights)


def test_a_step_that_keeps_columns_says_which_and_one_that_chooses_formats_what_it_measured(wide, done):
    kept = done(Quantize(method="llm_int8"), wide, "kept").summary["columns_kept"]
    assert kept and all(0 < count <= 256 for count in kept.values())
    mixed = done(Quantize(mixed={"millibits": 4500, "formats": ("int8", "int2")}), wide, "mixed").summary
    assert set(mixed["mixed"]["chosen"].values()) <= {"int8", "int2"} and mixed["bits_per_weight"] <= 4.5 + 1e-9


@torch.no_grad()
def test_gptq_loses_less_of_the_output_than_rounding_to_nearest(teacher_of, text, saved, done):
    """A pass whose inputs were never gathered equals rounding to nearest, and nothing else tells."""
    parent = saved(teacher_of())
    step = {"format": "int3", "group_size": 16}
    ids, seen, outs = text(8, 64, seed=5), text(32, 64), {}
    reference = load_model(parent, dtype=torch.float32)(ids).logits.log_softmax(-1)
    for method in ("rtn", "gptq"):
        out = done(Quantize(method=method, **step), parent, method, windows=seen).out
        outs[method] = load_model(out, dtype=torch.float32)(ids).logits.log_softmax(-1)
    nearest, carried = (float((reference.exp() * (reference - each)).sum(-1).mean()) for each in outs.values())
    assert math.isfinite(carried) and carried < 0.9 * nearest


@torch.no_grad()
def test_a_model_that_was_made_wide_and_narrow_again_computes_as_one_that_was_opened_narrow(small, ids):
    """Its frequencies of positions were once rounded to bfloat16 on the way, and static ranges measured with them."""
    from assay.ops.models.dense import move

    model = load_model(small)
    before = model(ids).logits
    assert torch.equal(move(move(model, torch.float32), torch.bfloat16)(ids).logits, before) and before.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


# --- refused ---------------------------------------------------------------------------------------------------------------------------------

NO_TEXT = [
    {"method": "gptq", "format": "int4"}, {"method": "llm_int8"}, {"method": "e8"}, {"method": "additive"}, {"format": "int4", "range": "output_mse"},
    {"mixed": {"millibits": 4500}}, {"format": "int8", "inputs": {"format": "int8", "per": "tensor"}},
]  # fmt: skip


@pytest.mark.parametrize("given", NO_TEXT, ids=str)
def test_a_step_that_looks_at_text_is_refused_without_any_before_the_model_is_opened(given, small, done, monkeypatch):
    from assay.ops.models import checkpoint

    monkeypatch.setattr(checkpoint, "load_model", lambda *_, **__: pytest.fail("opened"))
    step = Quantize.model_validate(given)
    with pytest.raises(ValueError, match=r"looks at text; got none, give windows: token ids of shape \[windows, length\]"):
        done(step, small, "none", windows=None)
    with pytest.raises(ValueError, match=r"looks at text; got \[0, 16\] of them, give windows"):
        done(step, small, "empty", windows=torch.zeros(0, 16, dtype=torch.long))


def test_a_text_that_is_too_short_is_told_before_the_model_is_opened(small, done, monkeypatch):
    from assay.ops.models import checkpoint

    def give(calibration):
        assert (calibration.windows, calibration.length) == (16, 512)
        raise ValueError("the text has 100 tokens, fewer than the 8,192 asked for")

    monkeypatch.setattr(checkpoint, "load_model", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ValueError, match="the text has 100 tokens, fewer than the 8,192 asked for"):
        done(Quantize(method="gptq", format="int4"), small, windows=give)


@pytest.mark.parametrize("method", ["rtn", "gptq", "hqq", "llm_int8"])
def test_a_group_that_does_not_divide_names_the_layer_and_what_would(method, make_llama, saved, done):
    parent = saved(make_llama(hidden=72, ffn=64, layers=1))
    with pytest.raises(
        ValueError, match="group_size=32 does not divide the 72 columns of the weight; the largest that does is 24"
    ) as caught:
        done(Quantize(method=method, format="int4", group_size=32), parent)
    assert any("q_proj" in note and "[72, 72]" in note for note in caught.value.__notes__)


@torch.no_grad()
def test_one_group_a_row_is_the_group_of_the_whole_width_and_does_not_reload_as_zeros(make_llama, saved, done):
    parent = saved(make_llama(hidden=72, ffn=72, layers=1))
    row, whole = (load_model(done(Quantize(format="int4", group_size=size), parent, f"{size}").out) for size in (-1, 72))
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in row.state_dict().items())
    assert row.model.layers[0].mlp.up_proj.weight.abs().max() > 0


def test_blocks_on_a_width_of_576_are_refused_with_the_layer(make_llama, saved, done):
    parent = saved(make_llama(hidden=576, ffn=128, layers=1, heads=9, kv_heads=3))
    with pytest.raises(ValueError, match=r"group_size=128 does not divide the 576 columns") as caught:
        done(Quantize(format="fp8_e4m3", group_size="block"), parent)
    assert "q_proj" in caught.value.__notes__[0]


@pytest.mark.parametrize("method", ["e8", "additive"])
def test_vectors_of_eight_on_a_width_that_takes_none_are_refused_before_any_is_rounded(method, make_llama, saved, done, monkeypatch):
    from assay.ops.quantize import calibrated

    monkeypatch.setattr(calibrated, "round_along", lambda *_: pytest.fail("rounded"))
    ffn, said = {"e8": (8 * 23, "no Hadamard matrix of size 184"), "additive": (100, "does not divide the 100 columns")}[method]
    with pytest.raises(ValueError, match=said) as caught:
        done(Quantize(method=method), saved(make_llama(ffn=ffn, layers=1)))
    assert "mlp." in caught.value.__notes__[0]


def test_a_budget_below_the_smallest_format_is_refused_before_anything_is_measured(small, done, monkeypatch):
    from assay.ops.quantize import allocate

    monkeypatch.setattr(allocate, "sensitivities", lambda *_: pytest.fail("measured"))
    with pytest.raises(
        ValueError, match=r"a budget of 2 bits a weight is below the 2\.25 that the smallest of int8, int4, int3, int2 take"
    ):
        done(Quantize(mixed={"millibits": 2000}), small)


@pytest.mark.parametrize(
    "given", [{"format": "int4"}, {"method": "gptq", "format": "int4"}, {"method": "e8"}, {"mixed": {"millibits": 4500}}], ids=str
)
def test_weights_that_are_not_finite_are_refused_by_name_before_any_is_rounded(given, small, tmp_path, windows, monkeypatch):
    from assay.ops.quantize import sequential

    monkeypatch.setattr(sequential, "walk", lambda *_, **__: pytest.fail("walked"))
    state = load_file(small / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][0, :2] = torch.nan
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_bytes((small / "config.json").read_bytes())
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight has 2 of 8,192 values that are NaN"):
        apply(Quantize.model_validate(given), broken, tmp_path / "out", windows=windows)
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("method", ["rtn", "hqq", "gptq", "llm_int8", "e8", "additive"])
def test_a_model_without_linear_layers_is_refused_and_not_left_as_it_is(method, done, saved):
    """GPT-2 keeps its weights transposed in modules of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ValueError, match=re.escape("the pass reaches 0 of")):
        done(
            Quantize(method=method, **({"format": "int4", "group_size": 32} if method in ("rtn", "hqq", "gptq") else {})),
            saved(GPT2LMHeadModel(config)),
        )


def test_what_is_packed_is_not_rounded_again(small, done):
    packed = done(Quantize(format="nf4"), small, "packed").out
    with pytest.raises(ValueError, match=r"quantize changes dense weights, but its parent is already quantized \(assay"):
        done(Quantize(format="int4"), packed, "again")
