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

from assay.ops.train import passes
from assay.ops.train.hidden import paired_blocks
from assay.ops.train.loop import Settings
from assay.ops.train.losses import divergence
from assay.ops.train.on_policy import OnPolicy
from assay.ops.train.recover import Objective, recover, zeros_of

ONE = Settings(steps=1, learning_rate=1e-3, record_every=1, evaluate_every=1)
FEW = Settings(steps=30, learning_rate=1e-2, warmup_steps=3, record_every=10, evaluate_every=10)


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
