"""The step ``smooth`` as an experiment meets it: logits stay, what follows rounds better, and what cannot be smoothed is refused first."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.ops.apply import apply
from assay.ops.models.checkpoint import load_model, load_tokenizer
from assay.schemas.rounding import Quantize, Smooth

BOTH = [Smooth(method="smoothquant"), Smooth(method="awq", format="int3", group_size=16)]
ids_of = pytest.mark.parametrize("step", BOTH, ids=lambda step: step.method)


@pytest.fixture(scope="module")
def float_parent(make_llama, save_checkpoint_dir, tmp_path_factory):
    return save_checkpoint_dir(make_llama(layers=2), tmp_path_factory.mktemp("float") / "parent")


def logits(directory, ids):
    with torch.no_grad():
        return load_model(directory, dtype=torch.float32)(ids).logits[0]


@ids_of
def test_a_smoothed_checkpoint_computes_what_its_parent_did_opened_and_in_the_engine(step, float_parent, done, ids, engine):
    made = done(step, float_parent)
    before = logits(float_parent, ids)
    for found in (logits(made.out, ids), engine(made.out)):
        assert (found - before).abs().max() < 1e-4 * before.abs().max()
    assert json.loads(json.dumps(made.summary, allow_nan=False))["method"] == step.method
    changed, kept = (load_file(directory / "model.safetensors") for directory in (made.out, float_parent))
    assert set(changed) == set(kept) and not torch.equal(
        changed["model.layers.0.mlp.up_proj.weight"], kept["model.layers.0.mlp.up_proj.weight"]
    )
    assert load_tokenizer(made.out)("a")["input_ids"] == load_tokenizer(float_parent)("a")["input_ids"]


@ids_of
def test_the_dtype_of_the_parent_is_kept_and_two_runs_give_the_same_bytes(step, small, done):
    one, other = ({path.name: path.read_bytes() for path in done(step, small, name).out.iterdir()} for name in ("one", "other"))
    assert one == other
    assert {tensor.dtype for tensor in load_file(small.parent / "parent" / "model.safetensors").values()} == {torch.bfloat16}
    assert not any(str(small.parent).encode() in content for name, content in one.items() if name.endswith((".json", ".md")))


def test_awq_makes_rounding_err_less_and_the_control_by_weights_errs_more_than_inputs(teacher_of, text, saved, done):
    """With channels whose inputs stand out, which is what it is for."""
    model = teacher_of()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 30
            layer.post_attention_layernorm.weight[5] *= 30
    parent, seen, ids = saved(model), text(32, 48), text(8, 48, seed=7)
    reference = logits(parent, ids).log_softmax(-1)
    grid = {"format": "int3", "group_size": 16}

    def harm(directory, name):
        out = done(Quantize(**grid), directory, name).out
        return float((reference.exp() * (reference - logits(out, ids).log_softmax(-1))).sum(-1).mean())

    plain = harm(parent, "plain")
    by = {each: done(Smooth(method="awq", **grid, salience=each), parent, each, windows=seen) for each in ("inputs", "weights")}
    found = {each: harm(made.out, f"{each}-int3") for each, made in by.items()}
    assert found["inputs"] < 0.8 * plain and found["inputs"] < found["weights"]
    assert all(pair["error"] <= pair["unscaled"] * (1 + 1e-6) for pair in by["inputs"].summary["pairs"].values())


def test_smoothing_a_mixture_keeps_logits_and_says_which_experts_saw_no_token(make_decoder, save_checkpoint_dir, tmp_path, done, ids):
    parent = save_checkpoint_dir(make_decoder("mixtral with a window", num_hidden_layers=2), tmp_path / "mixture")
    before = logits(parent, ids)
    for step in BOTH:
        made = done(step, parent, step.method, windows=ids[:, :2])
        assert (logits(made.out, ids) - before).abs().max() < 1e-3 * before.abs().max()
    assert made.summary["unseen"]


# --- refused ---------------------------------------------------------------------------------------------------------------------------------


@ids_of
def test_without_text_it_is_refused_before_the_model_is_opened(step, small, done, tmp_path, monkeypatch):
    from assay.ops.steps import whole

    monkeypatch.setattr(whole, "opened", lambda *_: pytest.fail("opened"))
    with pytest.raises(ValueError, match=f"{step.method} looks at text; got none, give windows: token ids of shape"):
        done(step, small, windows=None)
    with pytest.raises(ValueError, match=r"got \[0, 16\] of them"):
        apply(step, small, tmp_path / "out", windows=torch.zeros(0, 16, dtype=torch.long))


@ids_of
def test_what_is_rounded_is_not_smoothed(step, small, done):
    packed = done(Quantize(format="int4"), small, "packed").out
    with pytest.raises(
        ValueError, match=r"smooth changes dense weights, but its parent is already quantized .* put smooth before the quantization"
    ):
        done(step, packed)


@ids_of
def test_weights_that_are_not_finite_are_refused_by_name(step, small, done, tmp_path):
    state = load_file(small / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][1, 1] = torch.inf
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_bytes((small / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has 1 of 8,192 values that are NaN or infinite"):
        done(step, broken)


@ids_of
def test_blocks_whose_parts_have_other_names_are_refused(step, saved, done):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ValueError, match="Llama, Mistral, Qwen, Gemma"):
        done(step, saved(GPT2LMHeadModel(config)))


def test_a_group_that_does_not_divide_names_the_layer(make_llama, saved, done):
    with pytest.raises(ValueError, match="group_size=48 does not divide the 64 columns") as caught:
        done(Smooth(method="awq", group_size=48), saved(make_llama(layers=1)))
    assert any("q_proj" in note for note in caught.value.__notes__)
