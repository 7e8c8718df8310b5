"""The step ``distill`` as an experiment meets it: what the base says is kept, a student comes closer, zeros stay, and impossible requests are refused."""

import json

import pytest
import torch

from assay.ops.apply import apply
from assay.ops.models.checkpoint import load_model
from assay.ops.models.experts import weights
from assay.ops.steps.distill import asked_of_teacher, distill, teach
from assay.ops.steps.training import Running
from assay.schemas.pruning import PruneDepth, PruneWeights
from assay.schemas.rounding import Quantize
from assay.schemas.training import Distill, Lora

SHORT = {"tokens": 1500, "batch": 4, "length": 16, "learning_rate": 1e-2}


def windows(_text, count, length):
    return torch.randint(3, 98, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(teacher_of, save_checkpoint_dir, tmp_path_factory):
    return save_checkpoint_dir(teacher_of(vocab=98), tmp_path_factory.mktemp("bases") / "base")


@pytest.fixture(scope="module")
def shorter(base, tmp_path_factory):
    """The base without a block."""
    out = tmp_path_factory.mktemp("shorter")
    apply(PruneDepth(layers=1, score="random"), base, out, seed=1)
    return out


@pytest.fixture
def trained(base, tmp_path):
    """``trained(step, parent)``: the checkpoint and what was said, with the base's words kept where the step wants them so."""

    def run(step, parent, name="out", **more):
        out, said = tmp_path / name, None
        out.mkdir()
        if step.teacher != "model":
            said = tmp_path / f"said of {name}"
            said.mkdir()
            teach(step, base, said, windows=windows)
        return out, distill(step, parent, base, out, windows=windows, said=said, **more)

    return run


@pytest.mark.parametrize(
    "more",
    [
        {}, {"loss": "reverse_kl"}, {"loss": "jensen_shannon", "beta_pct": 30}, {"teacher": "model"}, {"teacher": "top_k", "top_k": 20},
        {"teacher": "model", "hidden_pct": 100}, {"teacher": "model", "on_policy_pct": 50}, {"cross_entropy_pct": 1}, {"lora": Lora(rank=16)},
    ],
    ids=str,
)  # fmt: skip
def test_a_student_comes_closer_to_its_base_and_is_a_normal_checkpoint(more, trained, shorter):
    out, told = trained(Distill(**SHORT, **more), shorter)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["steps"] == 24 and 1400 < told["tokens"] <= 1536  # a sample counts up to where it ends
    assert told["after"]["kl_nats"] < told["before"]["kl_nats"]
    assert load_model(out).config.num_hidden_layers == load_model(shorter).config.num_hidden_layers


def test_what_the_base_said_teaches_as_the_base_does(trained, shorter):
    """States are kept in bfloat16, so by its rounding."""
    curves = [trained(Distill(**SHORT, teacher=teacher), shorter, teacher)[1]["curve"] for teacher in ("model", "states")]
    for one, other in zip(*curves, strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], rel=0.02, abs=2e-3)


def test_cross_entropy_learns_the_text_and_not_the_base(trained, shorter):
    """The text here is random, which the base does not know: its own distribution is left the further behind."""
    _, by_text = trained(Distill(**SHORT, loss="cross_entropy"), shorter, "text")
    _, by_base = trained(Distill(**SHORT), shorter, "base")
    assert by_text["before"] == by_base["before"] and by_text["after"]["kl_nats"] > 1.5 * by_base["after"]["kl_nats"]


def test_zeros_of_pruned_weights_stay(base, trained, tmp_path):
    pruned = tmp_path / "pruned"
    pruned.mkdir()
    apply(PruneWeights(method="magnitude", pattern="2:4"), base, pruned)
    out, told = trained(Distill(**SHORT), pruned)
    before, after = (weights(load_model(each)) for each in (pruned, out))
    assert all((after[name][weight == 0] == 0).all() for name, weight in before.items())
    assert any((after[name] != weight).any() for name, weight in before.items())
    assert told["after"]["kl_nats"] < told["before"]["kl_nats"]


def test_a_run_that_was_killed_goes_on_and_comes_to_the_same(trained, shorter, tmp_path):
    step, state = Distill(**SHORT, teacher="model", hidden_pct=50), tmp_path / "state"
    whole, _ = trained(step, shorter, "whole")

    class KilledError(Exception):
        pass

    def die(at):
        if at.step == 9:
            raise KilledError

    import assay.ops.steps.training as training

    settings = training.settings_of

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("assay.ops.steps.distill.settings_of", lambda *args: settings(*args)._replace(save_seconds=0.0))
        with pytest.raises(KilledError):
            trained(step, shorter, "killed", running=Running(state=state, progress=die))
        assert list(state.iterdir())
        resumed, _ = trained(step, shorter, "resumed", running=Running(state=state))
    one, other = (load_model(out).state_dict() for out in (whole, resumed))
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_what_the_base_says_does_not_depend_on_how_it_is_learned():
    step = Distill(**SHORT)
    same = step.model_copy(update={"learning_rate": 1e-4, "loss": "reverse_kl", "temperature": 2.0})
    assert asked_of_teacher(step) == asked_of_teacher(same) != asked_of_teacher(step.model_copy(update={"length": 32}))


def test_a_quantized_parent_and_blocks_of_unknown_origin_are_refused(base, trained, tmp_path, make_llama, save_checkpoint_dir):
    packed = tmp_path / "packed"
    packed.mkdir()
    apply(Quantize(format="int8", group_size=-1), base, packed)
    with pytest.raises(ValueError, match=r"distill changes dense weights, but its parent is already quantized"):
        trained(Distill(**SHORT), packed)
    other = save_checkpoint_dir(make_llama(layers=5, vocab=98), tmp_path / "other")
    with pytest.raises(ValueError, match=r"do not say which of the .* they were"):
        trained(Distill(**SHORT, teacher="model", hidden_pct=10), other, "again")
