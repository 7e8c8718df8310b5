"""The step ``rotate`` as an experiment meets it: logits stay, what must run beside the weights is written, kept by what follows, and run by all who open it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from assay.ops.apply import apply, early_exit_draft
from assay.ops.models.checkpoint import load_model
from assay.ops.models.dense import load_dense
from assay.schemas.pruning import PruneDepth
from assay.schemas.rounding import Quantize, Rotate, Smooth
from assay.schemas.steps import DraftModel

EVERYWHERE = ("down", "o", "qk")


@pytest.fixture(scope="module")
def float_parent(make_llama, save_checkpoint_dir, tmp_path_factory):
    """In float32, where a rotation changes logits by rounding alone."""
    return save_checkpoint_dir(make_llama(layers=3), tmp_path_factory.mktemp("float") / "parent")


@pytest.fixture
def turned(done, float_parent):
    """A rotated checkpoint with transforms at run time, before down_proj, before o_proj, and of queries and keys."""
    return done(Rotate(online=EVERYWHERE), float_parent, "turned").out


def logits(directory, ids, **more):
    with torch.no_grad():
        return load_model(directory, dtype=torch.float32, **more)(ids).logits[0]


@pytest.mark.parametrize("given", [{}, {"method": "random"}, {"method": "spinquant", "steps": 2}], ids=str)
@pytest.mark.parametrize("online", [(), EVERYWHERE], ids=["folded", "online"])
def test_a_rotated_checkpoint_computes_what_its_parent_did_opened_and_in_the_engine(given, online, done, float_parent, ids, engine):
    made = done(Rotate(**given, online=online), float_parent)
    before = logits(float_parent, ids)
    assert (logits(made.out, ids) - before).abs().max() < 1e-3 * before.abs().max()
    assert (engine(made.out) - before).abs().max() < 1e-3 * before.abs().max()
    assert not torch.equal(
        load_dense(made.out).model.layers[0].mlp.up_proj.weight, load_dense(float_parent).model.layers[0].mlp.up_proj.weight
    )
    assert json.loads(json.dumps(made.summary, allow_nan=False))["online"] == [
        dict(zip(("module", "where", "size", "stride"), each.values(), strict=True)) for each in made.summary["online"]
    ]
    assert len(made.summary["online"]) == len(online)


def test_what_runs_beside_the_weights_is_in_the_config_and_without_it_the_logits_are_others(turned, ids):
    said = json.loads((turned / "config.json").read_text())["assay"]["online"]
    assert said == [
        {"module": "mlp.down_proj", "where": "input", "size": 128, "stride": 1}, {"module": "self_attn.o_proj", "where": "input", "size": 4, "stride": 16},
        {"module": "self_attn", "where": "after_rope", "size": 16, "stride": 1},
    ]  # fmt: skip
    with torch.no_grad():
        bare = load_dense(turned, dtype=torch.float32)(ids).logits[0]
    assert (bare - logits(turned, ids)).abs().max() > 0.5


def test_a_seed_gives_the_same_bytes_and_another_one_another_rotation(done, float_parent):
    one, same, other = (
        {path.name: path.read_bytes() for path in done(Rotate(online=("down",)), float_parent, name, seed=seed).out.iterdir()}
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same and one["assay.safetensors"] != other["assay.safetensors"]
    assert not any(str(float_parent.parent).encode() in content for name, content in one.items() if name.endswith(".json"))


@torch.no_grad()
@pytest.mark.parametrize(
    "given",
    [
        {"format": "int8", "group_size": -1, "inputs": {"format": "int8", "symmetric": False}},
        {"format": "nvfp4", "inputs": {"format": "fp8_e4m3"}},
        {"method": "gptq", "format": "int4", "inputs": {"format": "int8", "per": "tensor", "symmetric": False}},
        {"method": "e8"},
        {"format": "int4", "group_size": 32},
    ],
    ids=str,
)
def test_rotated_then_rounded_with_rounded_inputs_is_the_same_in_memory_in_the_file_and_in_the_engine(
    given, turned, done, ids, engine, close
):
    made = done(Quantize.model_validate(given), turned)
    assert made.summary["layout"] == "assay" and not made.summary["opens_plainly"]  # nobody else turns anything
    reopened = load_model(made.out)(ids).logits
    assert torch.equal(reopened, made.logits)
    wide = logits(made.out, ids)
    found = engine(made.out)
    assert close(found, wide) or ("inputs" in given and (found - wide).abs().mean() < 0.02 * wide.abs().mean())
    config = json.loads((made.out / "config.json").read_text())["assay"]
    assert len(config["online"]) == 3 and len(config.get("activations", {})) == (21 if "inputs" in given else 0)
    assert "Only Assay opens it" in (made.out / "README.md").read_text()


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama with scaled rope, tied", "qwen2 with a bias", "qwen3", "mistral with a window"])
def test_families_rotated_and_rounded_run_in_the_engine_as_opened(family, make_decoder, saved, done, ids, engine, close):
    rotated = done(Rotate(online=EVERYWHERE), saved(make_decoder(family, num_hidden_layers=2)), "turned").out
    out = done(Quantize(format="int8", group_size=-1, inputs={"format": "int8", "symmetric": False}), rotated).out
    wide, found = logits(out, ids), engine(out)
    assert close(found, wide) or (found - wide).abs().mean() < 0.02 * wide.abs().mean()


@torch.no_grad()
def test_a_static_range_is_that_of_what_is_read_after_the_rotation(turned, done, windows):
    """A range of inputs before they are turned would clip, or waste codes."""
    out = done(Quantize(format="int8", group_size=-1, inputs={"format": "int8", "per": "tensor"}), turned).out
    said = json.loads((out / "config.json").read_text())["assay"]["activations"]["model.layers.1.mlp.down_proj"]
    model = load_model(out)
    module, seen = model.model.layers[1].mlp.down_proj, []
    before = list(module._forward_pre_hooks)
    del module._forward_pre_hooks[before[-1]]  # rounding, which is last
    module.register_forward_pre_hook(lambda _module, args: seen.append(float(args[0].abs().max())))
    for name, other in model.named_modules():
        if name.endswith("_proj") and other is not module:
            hooks = list(other._forward_pre_hooks)
            turning = name.endswith(("down_proj", "o_proj"))
            for hook in hooks[1:] if turning else hooks:
                del other._forward_pre_hooks[hook]
    for at in range(0, len(windows), 4):
        model.model(windows[at : at + 4])
    assert said["scale"] * 127.5 == pytest.approx(max(seen), rel=1e-2)


def test_a_smoothed_then_rotated_then_rounded_variant_is_possible(float_parent, done, ids):
    smooth = done(Smooth(method="smoothquant"), float_parent, "smooth").out
    rotated = done(Rotate(), smooth, "rotated").out
    before = logits(float_parent, ids)
    assert (logits(rotated, ids) - before).abs().max() < 1e-3 * before.abs().max()
    assert done(Quantize(format="int4"), rotated).summary["opens_plainly"]


# --- drafts of such parents, and what comes after --------------------------------------------------------------------------------------------


def exit_early(parent, out, layers):
    out.mkdir()
    early_exit_draft(DraftModel(early_exit=layers), parent, out)
    return out


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_blocks_of_a_rotated_model_are_the_first_blocks_of_what_it_was(layers, turned, float_parent, tmp_path, ids, engine):
    early, plain = exit_early(turned, tmp_path / "early", layers), exit_early(float_parent, tmp_path / "plain", layers)
    before = logits(plain, ids)
    for found in (logits(early, ids), engine(early)):
        assert (found - before).abs().max() < 1e-3 * before.abs().max()


@torch.no_grad()
def test_the_first_blocks_of_a_model_with_rounded_inputs_round_theirs_and_name_no_others(turned, done, tmp_path, ids, engine):
    inputs = {"format": "int8", "symmetric": False}
    rounded = done(Quantize(format="int8", group_size=-1, inputs=inputs), turned, "rounded").out
    early = exit_early(rounded, tmp_path / "early", 1)
    said = json.loads((early / "config.json").read_text())["assay"]
    assert len(said["online"]) == 3 and {name.split(".")[2] for name in said["activations"]} == {"0"} and len(said["activations"]) == 7
    whole = load_model(rounded, dtype=torch.float32)
    whole.model.layers = whole.model.layers[:1]
    expected = whole(ids).logits[0]
    assert torch.equal(logits(early, ids), expected)
    assert (engine(early) - expected).abs().mean() < 0.02 * expected.abs().mean()


@pytest.mark.parametrize(
    "step", [PruneDepth(layers=1), Rotate(), Smooth(method="smoothquant"), Smooth(method="awq")], ids=lambda step: f"{step.kind}"
)
def test_what_reads_weights_alone_does_not_come_after_transforms_at_run_time(step, turned, done):
    with pytest.raises(
        ValueError, match=rf"{step.kind} reads weights alone, but its parent is rotated with online transforms; put {step.kind} before"
    ):
        done(step, turned)


# --- refused ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hadamard", "spinquant"])
def test_norms_after_attention_are_refused_by_name(method, make_decoder, saved, done, tmp_path):
    with pytest.raises(
        ValueError, match=r"block 0 of Gemma3ForCausalLM cannot be turned exactly: post_feedforward_layernorm\.weight, .* no weight behind"
    ):
        done(Rotate(method=method), saved(make_decoder("gemma3", num_hidden_layers=1)))
    assert not any((tmp_path / "out").iterdir())


def test_transforms_before_the_down_projections_of_experts_are_refused(make_decoder, saved, done):
    with pytest.raises(ValueError, match=r"is no module of its own .* leave out down"):
        done(Rotate(online=("down",)), saved(make_decoder("mixtral with a window", num_hidden_layers=1)))


def test_a_width_without_a_hadamard_matrix_is_refused_and_a_random_rotation_has_any(make_llama, saved, done):
    parent = saved(make_llama(hidden=92, layers=1, head_dim=16))
    with pytest.raises(ValueError, match=r"no Hadamard matrix of size 92 is known here.* a random rotation has any size"):
        done(Rotate(), parent)
    assert done(Rotate(method="random"), parent, "random").summary["method"] == "random"


def test_weights_that_lie_the_other_way_are_refused(saved, done):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ValueError, match="block 0 of GPT2LMHeadModel cannot be turned exactly"):
        done(Rotate(), saved(GPT2LMHeadModel(config)))


def test_learning_without_text_is_refused_before_the_model_is_opened(float_parent, done, tmp_path):
    step = Rotate(method="spinquant")
    with pytest.raises(ValueError, match="spinquant learns on text; got none, give windows"):
        done(step, float_parent, windows=None)
    with pytest.raises(ValueError, match=r"got \[0, 8\] of them"):
        apply(step, float_parent, tmp_path / "out", windows=torch.zeros(0, 8, dtype=torch.long))
    assert not any((tmp_path / "out").iterdir())


def test_what_is_rounded_is_not_rotated(float_parent, done):
    packed = done(Quantize(format="int4"), float_parent, "packed").out
    with pytest.raises(ValueError, match="rotate changes dense weights, but its parent is already quantized"):
        done(Rotate(), packed)


def test_what_is_rotated_online_does_not_open_without_its_transforms(turned):
    """Weights alone would be another model, and nothing in them says so."""
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(turned)
