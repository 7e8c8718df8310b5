"""Recovery by training: what is minimised, who teaches, what stays as it was, and that a killed run goes on."""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assay.ops.evaluate.divergence import head_of
from assay.ops.models.early_exit import early_exit
from assay.ops.train import passes
from assay.ops.train.hidden import paired_blocks
from assay.ops.train.loop import Settings
from assay.ops.train.losses import divergence
from assay.ops.train.on_policy import OnPolicy
from assay.ops.train.overlap import states_of
from assay.ops.train.recover import Objective, recover, zeros_of
from assay.ops.train.teachers import CachedStates, CachedTopK, teacher_states, top_k_logits

ONE = Settings(steps=1, learning_rate=1e-3, record_every=1, evaluate_every=1)
FEW = Settings(steps=30, learning_rate=1e-2, warmup_steps=3, record_every=10, evaluate_every=10)


@pytest.fixture(scope="module")
def teacher(teacher_of):
    return teacher_of()


@pytest.fixture
def student(teacher):
    return early_exit(copy.deepcopy(teacher), 1)


def pruned_half(model):
    """Half of the weights of every matrix of the blocks set to zero; their names."""
    names = [name for name, parameter in model.named_parameters() if "layers" in name and parameter.ndim == 2]
    with torch.no_grad():
        for name in names:
            weight = model.get_parameter(name)
            weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name))) < 0.5] = 0
    return names


def log_probabilities(model, windows):
    with torch.no_grad():
        return model(windows).logits.log_softmax(-1)


def first_loss(student, teacher, windows, text, **more):
    return recover(student, teacher, windows, text(2, seed=9), settings=ONE, rows=len(windows), **more)[-1].loss


def moved(student, before):
    return {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}


# --- what is minimised -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "total_variation", "jensen_shannon"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_named_divergence_is_minimised_as_its_sum_over_the_vocabulary_and_mean_over_positions(
    loss, temperature, teacher, student, text
):
    windows = text(4)
    p, q = (log_probabilities(model, windows).flatten(0, 1) for model in (teacher, student))
    expected = divergence(loss, temperature=temperature, beta=0.25)(p, q).mean().item()
    found = first_loss(student, teacher, windows, text, objective=Objective(loss, beta=0.25, temperature=temperature))
    assert found == pytest.approx(expected, rel=1e-4)


def test_cross_entropy_is_the_mean_over_what_the_text_says_next_and_asks_no_teacher(teacher, student, text):
    windows = text(4)
    q = log_probabilities(student, windows)
    expected = -q[:, :-1].gather(-1, windows[:, 1:, None]).mean().item()
    seen = []
    hook = teacher.base_model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.last_hidden_state.shape[:2])))
    points = recover(student, teacher, windows, text(2, 20, seed=9), settings=ONE, rows=4, objective=Objective("cross_entropy"))
    hook.remove()
    assert points[-1].loss == pytest.approx(expected, rel=1e-4) and points[-1].tokens == windows.numel()
    assert (4, 24) not in seen and (2, 20) in seen  # the held-out text alone


def test_a_percentage_of_cross_entropy_stands_beside_the_divergence(teacher, student, text):
    windows = text(4)
    parts = [
        first_loss(copy.deepcopy(student), teacher, windows, text, objective=Objective(loss)) for loss in ("forward_kl", "cross_entropy")
    ]
    found = first_loss(student, teacher, windows, text, objective=Objective(ce_pct=30))
    assert found == pytest.approx(0.7 * parts[0] + 0.3 * parts[1], rel=1e-5)


def test_rows_that_the_student_wrote_teach_no_cross_entropy(teacher, student, text):
    """The loss of the one row that is text is the same whatever the other goes on with."""
    found = []
    for token in (9, 33):
        sample = lambda model, prompts, new, random, token=token: torch.cat([prompts, torch.full((1, new), token)], dim=1)  # noqa: E731
        found.append(
            first_loss(
                copy.deepcopy(student), teacher, text(2), text, objective=Objective("cross_entropy"), on_policy=OnPolicy(50, sample=sample)
            )
        )
    assert found[0] == found[1] > 0


def test_a_model_taught_by_itself_stays_where_it_is_and_another_does_not(teacher, teacher_of, text):
    """The gradient is rounding alone; an epsilon above it keeps AdamW from scaling it up to steps of the learning rate."""
    found = []
    for student in (copy.deepcopy(teacher), teacher_of(seed=1)):
        before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
        settings = FEW._replace(weight_decay=0.0, learning_rate=1e-3, epsilon=1e-3)
        points = recover(
            student, teacher, text(24), text(4, seed=1), settings=settings, objective=Objective(hidden=paired_blocks(range(3)))
        )
        far = max(float((tensor - before[name]).abs().max()) for name, tensor in student.state_dict().items())
        found.append((far, max(point.loss for point in points[1:]), points[-1].metrics["kl_nats"]))
    assert max(found[0]) < 1e-5 and min(found[1]) > 1e-3


def test_recovery_brings_back_what_pruning_took(teacher, student, text):
    points = recover(student, teacher, text(240), text(16, seed=1), settings=FEW)
    assert [point.step for point in points if point.metrics] == [0, 10, 20, 30]
    kl = [point.metrics["kl_nats"] for point in points if point.metrics]
    assert kl == sorted(kl, reverse=True) and kl[-1] < 0.5 * kl[0]
    assert points[-1].metrics["top1_agreement"] > points[0].metrics["top1_agreement"]
    assert len({point.metrics["base_log_perplexity"] for point in points if point.metrics}) == 1
    assert json.loads(json.dumps([point._asdict() for point in points], allow_nan=False))


def test_parts_of_a_batch_give_the_step_of_the_whole(teacher, student, text, monkeypatch):
    """With all terms at once: samples that end early, text, hidden states through a map of one width."""
    sample = lambda model, prompts, new, random: torch.cat([prompts, torch.tensor([9, 2]).repeat(len(prompts), new // 2)], dim=1)  # noqa: E731
    arguments = {
        "objective": Objective(ce_pct=40, hidden=((0, 1),), hidden_weight=0.5), "on_policy": OnPolicy(40, 6, {2}, sample), "rows": 5,
        "settings": FEW._replace(steps=3, warmup_steps=0, record_every=1, evaluate_every=1, learning_rate=1e-3),
    }  # fmt: skip
    found = []
    for tokens in (10_000, 24, 50):
        monkeypatch.setattr(passes, "FORWARD_TOKENS", tokens)
        model = copy.deepcopy(student)
        points = recover(model, teacher, text(20), text(4, seed=1), **arguments)
        found.append(([point.loss for point in points[1:]], [point.gradient_norm for point in points[1:]], list(model.parameters())))
    for losses, norms, after in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-4) and norms == pytest.approx(found[0][1], rel=1e-3)
        assert all(torch.allclose(mine, theirs, atol=1e-4) for mine, theirs in zip(after, found[0][2], strict=True))


# --- hidden states ---------------------------------------------------------------------------------------------------------------------------


def test_hidden_states_are_compared_block_by_block_whatever_their_size(teacher, student, text):
    windows = text(3)
    with torch.no_grad():
        own = student(windows, output_hidden_states=True).hidden_states[0]  # one block alone: its output is seen after the final norm only
        blocks = []
        hook = student.model.layers[0].register_forward_hook(lambda module, args, output: blocks.append(output))
        student(windows)
        hook.remove()
        other = teacher(windows, output_hidden_states=True).hidden_states[2]
    unit = lambda states: states / states.square().mean(-1, keepdim=True).sqrt()  # noqa: E731
    expected = (unit(blocks[0]) - unit(other)).square().mean().item()
    assert not torch.equal(own, blocks[0])
    plain = first_loss(copy.deepcopy(student), teacher, windows, text)
    found = first_loss(student, teacher, windows, text, objective=Objective(hidden=((0, 1),), hidden_weight=3.0))
    assert found - plain == pytest.approx(3 * expected, rel=1e-3)


def test_a_student_of_another_width_learns_through_a_map_that_is_no_part_of_it(teacher, teacher_of, text):
    student = teacher_of(hidden=16, layers=2, seed=1)
    names, before = set(student.state_dict()), copy.deepcopy(student.state_dict())
    objective = Objective(hidden=((0, 0), (1, 2)), hidden_weight=5.0)
    points = recover(student, teacher, text(240), text(8, seed=1), settings=FEW, objective=objective)
    assert points[-1].loss < 0.8 * points[1].loss and points[-1].metrics["kl_nats"] < points[0].metrics["kl_nats"]
    assert set(student.state_dict()) == names == moved(student, before)


# --- teachers that are not run ---------------------------------------------------------------------------------------------------------------


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


def test_pruned_weights_stay_exactly_zero_through_clipping_decay_and_accumulation(teacher, text, monkeypatch):
    monkeypatch.setattr(passes, "FORWARD_TOKENS", 50)
    student = copy.deepcopy(teacher)
    names = pruned_half(student)
    zeros = zeros_of(student, names)
    before = copy.deepcopy(student.state_dict())
    settings = FEW._replace(clip=0.05, weight_decay=0.3, steps=12)
    points = recover(student, teacher, text(96), text(8, seed=1), settings=settings, zeros=zeros)
    assert points[-1].metrics["kl_nats"] < points[0].metrics["kl_nats"]
    for name, mask in zeros.items():
        weight = student.get_parameter(name).detach()
        assert torch.equal(weight == 0, mask) and not torch.equal(weight, before[name])


def test_without_zeros_the_pruned_weights_come_back(teacher, text):
    student = copy.deepcopy(teacher)
    names = pruned_half(student)
    zeros = zeros_of(student, names)
    recover(student, teacher, text(24), text(2, seed=1), settings=ONE)
    assert all((student.get_parameter(name)[mask] != 0).any() for name, mask in zeros.items())


def test_zeros_that_are_none_and_names_that_are_none_are_refused(teacher, student, text):
    name = "model.layers.0.mlp.up_proj.weight"
    weight = student.get_parameter(name)
    with pytest.raises(ValueError, match=r"2,048 of the 2,048 weights of student\.model\.layers\.0\.mlp\.up_proj\.weight .* are not zero"):
        recover(student, teacher, text(8), text(2), settings=ONE, zeros={name: torch.ones_like(weight, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"zeros are to stay in student\.lm_head, which is not trained here"):
        recover(student, teacher, text(8), text(2), settings=ONE, zeros={"lm_head": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"torch\.bool \[3\]; a bool for each of its \[64, 32\] weights"):
        recover(student, teacher, text(8), text(2), settings=ONE, zeros={name: torch.ones(3, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"no parameter up_proj; names such as model\.embed_tokens\.weight"):
        zeros_of(student, ["up_proj"])


# --- how it runs -----------------------------------------------------------------------------------------------------------------------------


def test_blocks_in_bfloat16_leave_the_weights_float32_and_the_loss_nearly_the_same(teacher, student, text):
    windows, dtypes = text(4), []
    hook = student.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    other = copy.deepcopy(student)
    found = [first_loss(model, teacher, windows, text, bf16=bf16) for model, bf16 in ((student, True), (other, False))]
    hook.remove()
    assert torch.bfloat16 in dtypes and dtypes[-1] == torch.float32  # evaluations stay as they are
    assert found[0] == pytest.approx(found[1], rel=0.02) and found[0] != found[1]
    assert all(parameter.dtype == torch.float32 for parameter in student.parameters())


def test_documents_of_a_window_do_not_teach_one_another(teacher, student, text):
    """The loss of two documents in a row is the mean of theirs alone; without the end named it is not."""
    first, second = text(1, 11), text(1, 11, seed=3)
    end = torch.tensor([[2]])
    row = torch.cat([first, end, second, end], dim=1)
    alone = [first_loss(copy.deepcopy(student), teacher, torch.cat([each, end], dim=1), text) for each in (first, second)]
    found = first_loss(copy.deepcopy(student), teacher, row, text, document_ends={2})
    assert found == pytest.approx(sum(alone) / 2, rel=1e-4)
    assert first_loss(copy.deepcopy(student), teacher, row, text) != pytest.approx(found, rel=1e-3)


def test_a_loss_that_rises_far_above_its_lowest_ends_the_run(teacher, text):
    from assay.ops.train.loop import DivergedError

    student = copy.deepcopy(teacher)
    settings = FEW._replace(learning_rate=0.5, warmup_steps=0, record_every=1, evaluate_every=10, stop_above=2.0)
    with pytest.raises(
        DivergedError, match=r"diverged by step \d+ of 30: the loss rose to .* from .*at most 2 times .* A lower learning rate than 0\.5"
    ):
        recover(student, teacher, text(240), text(2, seed=1), settings=settings)


PROGRAM = """
import copy, os, signal, sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
sys.path[:0] = [{tests!r}]
here = SourceFileLoader("test_recover", {tests!r} + "/test_recover.py").load_module()
shared = SourceFileLoader("shared", {tests!r} + "/../conftest.py").load_module()
teacher = shared.make_teacher()
here.masked_with_maps(teacher, shared.make_teacher, Path({state!r}), lambda now: os.kill(os.getpid(), signal.SIGKILL) if now.step == {at} else None)
"""


def masked_with_maps(teacher, teacher_of, state=None, progress=None):
    student = teacher_of(hidden=16, layers=2, seed=1)
    zeros = zeros_of(student, pruned_half(student))
    windows = torch.randint(3, 64, (40, 24), generator=torch.Generator().manual_seed(0))
    settings = FEW._replace(steps=9, record_every=3, evaluate_every=3, save_seconds=0.0)
    objective = Objective(ce_pct=10, hidden=((0, 0), (1, 2)))
    points = recover(
        student, teacher, windows, windows[:2], objective=objective, settings=settings, rows=4, zeros=zeros, on_policy=OnPolicy(25), state=state,
        progress=progress,
    )  # fmt: skip
    return student, zeros, points


def test_a_killed_run_goes_on_with_its_masks_and_maps(teacher, teacher_of, tmp_path):
    at = 2 + os.getpid() % 5  # any moment does
    program = PROGRAM.format(tests=str(Path(__file__).parent), state=str(tmp_path), at=at)
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    whole, zeros, expected = masked_with_maps(teacher, teacher_of)
    seen = []
    later, _, found = masked_with_maps(teacher, teacher_of, tmp_path, seen.append)
    assert seen[0].step == at + 1  # nothing is done twice
    assert [point.loss for point in found[1:]] == pytest.approx([point.loss for point in expected[1:]], rel=1e-5)
    assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(later.parameters(), whole.parameters(), strict=True))
    assert all(torch.equal(later.get_parameter(name) == 0, mask) for name, mask in zeros.items())


def test_another_objective_does_not_go_on_from_a_state(teacher, student, text, tmp_path):
    def stop(now):
        if now.step == 2:
            raise KeyboardInterrupt

    settings = FEW._replace(save_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        recover(copy.deepcopy(student), teacher, text(24), text(2), settings=settings, state=tmp_path, progress=stop)
    with pytest.raises(ValueError, match=r"another run: ce_pct 5 \(there 0\)"):
        recover(student, teacher, text(24), text(2), settings=settings, state=tmp_path, objective=Objective(ce_pct=5))
