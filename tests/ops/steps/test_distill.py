"""The step ``distill`` as an experiment meets it: what the base says is kept, a student comes closer, zeros stay, and impossible requests are refused."""

import json
import math

import pytest
import torch

from assay.ops.apply import apply
from assay.ops.models.checkpoint import load_model
from assay.ops.models.experts import weights
from assay.ops.steps.distill import asked_of_teacher, distill, teach
from assay.ops.steps.domains import reading_of
from assay.ops.steps.training import Running
from assay.ops.suites.recovery import recovery
from assay.ops.suites.subject import Subject
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Recovery
from assay.schemas.pruning import PruneDepth, PruneWeights
from assay.schemas.rounding import Quantize
from assay.schemas.texts import Text
from assay.schemas.training import Distill, Domain, Lora

SHORT = {"tokens": 1500, "batch": 4, "length": 16, "learning_rate": 1e-2}


TWO = (Domain(text=Text(name="wikipedia"), share_pct=75), Domain(text=Text(path="lists.txt"), share_pct=25))


def windows(text, count, length):
    """Random ids; of lists.txt, which has 200 windows, ids that follow one another."""
    if text.path != "lists.txt":
        return torch.randint(3, 98, (count, length), generator=torch.Generator().manual_seed(0))
    if count > 200:
        raise ValueError(f"the text has {200 * length:,} tokens, fewer than the {count * length:,} asked for")
    return 3 + (torch.arange(count)[:, None] * 7 + torch.arange(length)) % 95


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


@pytest.mark.parametrize("more", [{"teacher": "model", "hidden_pct": 50}, {"domains": TWO}], ids=["hidden", "domains"])
def test_a_run_that_was_killed_goes_on_and_comes_to_the_same(more, trained, shorter, tmp_path):
    step, state = Distill(**SHORT, **more), tmp_path / "state"
    whole, expected = trained(step, shorter, "whole")

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
        resumed, told = trained(step, shorter, "resumed", running=Running(state=state))
    one, other = (load_model(out).state_dict() for out in (whole, resumed))
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
    assert [point["metrics"].keys() for point in told["curve"]] == [point["metrics"].keys() for point in expected["curve"]]
    assert told["after"] == pytest.approx(expected["after"], rel=1e-4)


def test_of_domains_as_many_windows_as_their_shares_are_read_and_alike_many_held_out():
    read, held_out, domains = reading_of(Distill(**SHORT, domains=TWO), windows)
    assert domains.windows.bincount().tolist() == [72, 24] and domains.held_out.bincount().tolist() == [
        129,
        129,
    ]  # of 96 rows; of 4096 tokens
    for number, (domain, count) in enumerate(zip(TWO, (72, 24), strict=True)):
        own = windows(domain.text, count + 129, 16)
        assert read[domains.windows == number].equal(own[:count]) and held_out[domains.held_out == number].equal(own[count:])
    odd = Distill(
        **SHORT | {"tokens": 1}, domains=(TWO[0].model_copy(update={"share_pct": 99}), TWO[1].model_copy(update={"share_pct": 1}))
    )
    assert reading_of(odd, windows).domains.windows.bincount().tolist() == [4, 1]  # each has a window
    with pytest.raises(ValueError, match="fewer than the 5,264 asked for") as caught:
        reading_of(Distill(**SHORT | {"tokens": 12_800}, domains=TWO), windows)
    assert (
        "the domain lists.txt is to have 200 windows of 16 tokens, 25 percent of the 800 rows that are read, and 129"
        in caught.value.__notes__[0]
    )


@pytest.mark.parametrize("more", [{}, {"teacher": "model"}, {"teacher": "top_k", "top_k": 20}], ids=str)
def test_domains_are_told_beside_the_bases_own_loss_and_their_weights_become_facts(more, trained, shorter, base):
    step = Distill(**SHORT, **more, domains=TWO)
    out, told = trained(step, shorter)
    _, held_out, domains = reading_of(step, windows)
    found = recovery(Recovery(), Subject(out, None, None, base), reference=None, experiment_dir=None).metrics
    value = {(row["metric"], row["slice_kind"], row["slice"]): row["value"] for row in found}
    for number, name in enumerate(("wikipedia", "lists.txt")):
        ids = held_out[domains.held_out == number]
        with torch.no_grad():
            logits = load_model(base, dtype=torch.float32)(ids).logits[:, :-1, :98]
        nll = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        assert value["teacher_log_perplexity", "domain", name] == pytest.approx(nll, rel=1e-4)
        assert value["domain_weight", "domain_tokens", f"{name}/0"] == (0.75, 0.25)[number]
        last = told["curve"][-1]["metrics"]
        assert value["student_log_perplexity", "domain", name] == last[f"log_perplexity_domain_{number}"]
        assert value["student_log_perplexity", "domain_tokens", f"{name}/1536"] == last[f"log_perplexity_domain_{number}"]
    weights, at = [0.75, 0.25], [point for point in told["curve"][1:] if point["metrics"]]
    for point in at:  # w ∝ w · exp(max(loss − the base's, 0))
        above = [
            max(0.0, point["metrics"][f"log_perplexity_domain_{n}"] - point["metrics"][f"base_log_perplexity_domain_{n}"]) for n in (0, 1)
        ]
        weights = [weight * math.exp(each) for weight, each in zip(weights, above, strict=True)]
        assert point["metrics"]["weight_domain_0"] == pytest.approx(weights[0] / sum(weights))
    assert len(at) == 5 and value["domain_weight", "domain", "wikipedia"] != 0.75
    assert all(row["metric"] in METRICS["recovery"] for row in found)


def test_what_the_base_says_does_not_depend_on_how_it_is_learned():
    step = Distill(**SHORT)
    same = step.model_copy(update={"learning_rate": 1e-4, "loss": "reverse_kl", "temperature": 2.0})
    assert asked_of_teacher(step) == asked_of_teacher(same) != asked_of_teacher(step.model_copy(update={"length": 32}))
    assert asked_of_teacher(step) != asked_of_teacher(step.model_copy(update={"domains": TWO}))


def test_a_quantized_parent_and_blocks_of_unknown_origin_are_refused(base, trained, tmp_path, make_llama, save_checkpoint_dir):
    packed = tmp_path / "packed"
    packed.mkdir()
    apply(Quantize(format="int8", group_size=-1), base, packed)
    with pytest.raises(ValueError, match=r"distill changes dense weights, but its parent is already quantized"):
        trained(Distill(**SHORT), packed)
    other = save_checkpoint_dir(make_llama(layers=5, vocab=98), tmp_path / "other")
    with pytest.raises(ValueError, match=r"do not say which of the .* they were"):
        trained(Distill(**SHORT, teacher="model", hidden_pct=10), other, "again")
