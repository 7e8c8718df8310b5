"""Recovery from what a teacher said: cached states and likeliest ids teach as the model does, and a cache cannot give what only the model can."""

import copy

import pytest
import torch

from assay.ops.evaluate.divergence import head_of
from assay.ops.train.loop import Settings
from assay.ops.train.on_policy import OnPolicy
from assay.ops.train.overlap import states_of
from assay.ops.train.recover import Objective, recover
from assay.ops.train.teachers import CachedStates, CachedTopK, teacher_states, top_k_logits

ONE = Settings(steps=1, learning_rate=1e-3, record_every=1, evaluate_every=1)
FEW = Settings(steps=30, learning_rate=1e-2, warmup_steps=3, record_every=10, evaluate_every=10)


def log_probabilities(model, windows):
    with torch.no_grad():
        return model(windows).logits.log_softmax(-1)


def first_loss(student, teacher, windows, text, **more):
    return recover(student, teacher, windows, text(2, seed=9), settings=ONE, rows=len(windows), **more)[-1].loss


def cached(teacher, windows, held_out, dtype=torch.float32):
    return CachedStates(teacher_states(teacher, windows, dtype=dtype), states_of(teacher, held_out), head_of(teacher))


def test_cached_states_teach_what_the_model_teaches_and_the_model_is_not_run(teacher, student, text):
    windows, held_out = text(24), text(4, seed=1)
    settings = FEW._replace(steps=6, warmup_steps=0, record_every=2, evaluate_every=2)
    other, narrow = copy.deepcopy(student), copy.deepcopy(student)
    expected = recover(student, teacher, windows, held_out, settings=settings)
    known = cached(teacher, windows, held_out)
    seen = []
    hook = teacher.register_forward_hook(lambda *_: seen.append(1))
    found = recover(other, known, windows, held_out, settings=settings)
    hook.remove()
    assert not seen
    for one, same in zip(found, expected, strict=True):
        assert one.tokens == same.tokens and one.loss == (same.loss and pytest.approx(same.loss, rel=1e-4))
        assert one.metrics == pytest.approx(same.metrics, rel=1e-3)
    rounded = recover(narrow, cached(teacher, windows, held_out, torch.bfloat16), windows, held_out, settings=settings)
    assert rounded[-1].loss == pytest.approx(expected[-1].loss, rel=0.02)


@pytest.mark.parametrize("tail", ["bucket", "renormalised"])
def test_likeliest_ids_teach_with_a_bias_that_is_told(tail, teacher, student, text):
    windows, held_out = text(240), text(8, seed=1)
    known = CachedTopK(top_k_logits(teacher, windows, 8), states_of(teacher, held_out), head_of(teacher), tail)
    first, *_, last = recover(student, known, windows, held_out, settings=FEW)
    p = log_probabilities(teacher, held_out).exp().sort(descending=True).values
    assert first.metrics["tail_mass"] == pytest.approx(p[..., 8:].sum(-1).mean().item(), rel=1e-3)
    assert last.metrics["kl_nats"] < 0.7 * first.metrics["kl_nats"]
    assert last.metrics["full_loss_nats"] < first.metrics["full_loss_nats"]
    if tail == "bucket":  # merging events loses some of the divergence and never adds to it
        assert 0 < first.metrics["top_k_loss_nats"] < first.metrics["full_loss_nats"]


def test_nearly_all_ids_teach_what_the_full_distributions_teach(teacher, student, text):
    windows, held_out = text(4), text(4, seed=1)
    expected = first_loss(copy.deepcopy(student), teacher, windows, text, objective=Objective("jensen_shannon"))
    known = CachedTopK(top_k_logits(teacher, windows, 63), states_of(teacher, text(2, seed=9)), head_of(teacher))
    assert first_loss(student, known, windows, text, objective=Objective("jensen_shannon")) == pytest.approx(expected, rel=1e-4)
    assert held_out.shape == (4, 24)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"objective": Objective(hidden=((0, 0),))},
            r"hidden states of its blocks cannot be looked up in a teacher's cache \(CachedStates\); give the model",
        ),
        ({"on_policy": OnPolicy(25)}, r"samples \(25 percent of the rows\) cannot be looked up"),
        ({"windows": 23}, r"the teacher's cache is of windows \[24, 24\], and \[23, 24\] are given"),
        ({"held_out": 3}, r"the teacher's cache is of held-out windows \[4, 24\], and \[3, 24\] are given"),
        ({"objective": Objective(ce_pct=100)}, r"100 percent of cross-entropy beside forward_kl; 0 to 99"),
        (
            {"objective": Objective("cross_entropy", ce_pct=1)},
            r"1 percent of cross-entropy beside cross-entropy; a divergence was expected",
        ),
        ({"objective": Objective("kl")}, r"no loss is named 'kl'"),
    ],
)
def test_what_a_cache_cannot_give_and_what_is_no_loss_is_refused(change, says, teacher, student, text):
    known = cached(teacher, text(24), text(4, seed=1))
    windows, held_out = text(change.get("windows", 24)), text(change.get("held_out", 4), seed=1)
    rest = {name: value for name, value in change.items() if name not in ("windows", "held_out")}
    with pytest.raises(ValueError, match=says):
        recover(student, known, windows, held_out, settings=ONE, **rest)


def test_a_tail_in_a_bucket_has_no_other_temperature(teacher, student, text):
    known = CachedTopK(top_k_logits(teacher, text(8), 4), states_of(teacher, text(2, seed=9)), head_of(teacher))
    with pytest.raises(ValueError, match=r"temperature=2.0 with the tail in a bucket: .* temperature 1 work"):
        recover(student, known, text(8), text(2, seed=9), settings=ONE, objective=Objective(temperature=2.0))
    points = recover(
        student, known._replace(tail="renormalised"), text(8), text(2, seed=9), settings=ONE, objective=Objective(temperature=2.0)
    )
    assert points[-1].loss > 0


def test_a_teacher_that_may_drop_out_and_ids_of_another_tokenizer_are_refused(teacher, student, text):
    with pytest.raises(ValueError, match=r"the teacher, LlamaForCausalLM, is in training mode"):
        recover(student, copy.deepcopy(teacher).train(), text(8), text(2), settings=ONE)
    with pytest.raises(ValueError, match=r"the text has id 64, and the models share 64 ids"):
        recover(student, teacher, torch.full((8, 8), 64), text(2), settings=ONE)


@pytest.mark.parametrize("how", ["model", "states", "top_k"])
def test_mass_on_ids_that_only_the_teacher_has_is_cut_off_and_the_rest_renormalised(how, teacher, student, teacher_of, text):
    """The teacher's head has 72 rows where the student's has 64, and puts most of its mass on id 70; the loss is finite, that of the cut logits."""
    padded = teacher_of(vocab=72)
    state = padded.state_dict()
    for name, tensor in teacher.state_dict().items():
        state[name][: len(tensor)] = tensor
    state["lm_head.weight"][70] = 10 * state["lm_head.weight"][3]
    windows, held_out = text(4), text(2, seed=9)
    held = states_of(padded, held_out)
    known = {
        "model": padded, "states": CachedStates(teacher_states(padded, windows, dtype=torch.float32), held, head_of(padded)),
        "top_k": CachedTopK(top_k_logits(padded, windows, 63, vocabulary=64), held, head_of(padded)),
    }[how]  # fmt: skip
    with torch.no_grad():
        p, q = padded(windows).logits[..., :64].log_softmax(-1), log_probabilities(student, windows)
    expected = (p.exp() * (p - q)).sum(-1).mean().item()
    assert padded(windows).logits.softmax(-1)[..., 70].mean() > 0.2
    assert first_loss(student, known, windows, text, vocabulary=64) == pytest.approx(expected, rel=1e-3)
    if how == "top_k":
        with pytest.raises(ValueError, match="the teacher's likeliest ids are of 72, and the student shares 64"):
            first_loss(student, known._replace(top=top_k_logits(padded, windows, 8)), windows, text, vocabulary=64)


# --- zeros -----------------------------------------------------------------------------------------------------------------------------------
