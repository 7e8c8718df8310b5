"""The loop on models small enough to work out: the schedule, accumulation, clipping, the curve, and that a killed run goes on as if nothing had been."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from assay.ops.train import state as states
from assay.ops.train.loop import DivergedError, Loss, Point, Progress, Settings, learning_rate, train

QUICK = Settings(steps=12, learning_rate=0.05, warmup_steps=3, record_every=4, evaluate_every=4, save_seconds=0.0)


class Small(nn.Module):
    """A regression with dropout: what it learns depends on the random state of every step."""

    def __init__(self, *, seed: int = 0, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.dropout = nn.Linear(4, 8), nn.Linear(8, 1), nn.Dropout(dropout)

    def forward(self, x):
        return self.second(self.dropout(self.first(x).tanh()))


def data(step: int, rows: int = 6):
    random = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 4, generator=random)
    return x, x.sum(dim=1, keepdim=True)


def of(model):
    def objective(part):
        x, y = part
        return Loss((model(x) - y).square().sum(), len(x))

    return objective


def run(model, settings=QUICK, **more):
    return train(model, lambda step: [data(step)], of(model), settings, **more)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# --- how a step is made ----------------------------------------------------------------------------------------------------------------------


def test_the_schedule_worked_by_hand():
    settings = Settings(steps=9, learning_rate=1.0, warmup_steps=4, final_share=0.2)
    found = [learning_rate(step, settings) for step in range(9)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2])
    assert learning_rate(0, Settings(steps=1, learning_rate=0.3)) == 0.3


def test_the_first_step_is_adamw_by_hand():
    """After one step both moments are their corrected selves, so each weight moves by the rate, against the sign of its gradient."""
    model = nn.Linear(3, 1)
    before = weights(model)
    x = torch.tensor([[1.0, -2.0, 0.5]])
    settings = Settings(steps=1, learning_rate=0.01, weight_decay=0.1, record_every=1, evaluate_every=1)
    train(model, lambda step: [x], lambda part: Loss(model(part).sum(), 1), settings)
    assert torch.allclose(model.weight, before["weight"] * (1 - 0.01 * 0.1) - 0.01 * x.sign(), atol=1e-6)
    assert torch.allclose(model.bias, before["bias"] - 0.01, atol=1e-6)  # no decay


def test_parts_of_uneven_size_give_the_mean_over_all_tokens():
    """A mean of means would weigh the token of the small part five times."""
    found = []
    for cuts in ([6], [5, 1], [1, 2, 3]):
        model = Small(dropout=0.0)
        settings = QUICK._replace(steps=5, warmup_steps=0, clip=0.5)
        parts = lambda step, cuts=cuts: list(zip(*(each.split(cuts) for each in data(step)), strict=True))  # noqa: E731
        points = train(model, parts, of(model), settings)
        found.append((points[-1].loss, points[-1].gradient_norm, weights(model)))
    for loss, norm, after in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5) and norm == pytest.approx(found[0][1], rel=1e-4)
        assert all(torch.allclose(after[name], found[0][2][name], atol=1e-6) for name in after)


@pytest.mark.parametrize(("clip", "moved"), [(1.0, [0.6, -0.8]), (100.0, [3.0, -4.0])])
def test_a_longer_gradient_is_scaled_to_the_clip_and_its_own_norm_is_told(clip, moved, monkeypatch):
    model = nn.Linear(2, 1, bias=False)
    seen = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: seen.append(model.weight.grad.clone()))
    x = torch.tensor([[3.0, -4.0], [3.0, -4.0]])
    settings = Settings(steps=1, learning_rate=0.1, clip=clip, record_every=1, evaluate_every=1)
    points = train(model, lambda step: [x], lambda part: Loss(model(part).sum(), 2), settings)
    assert points[-1].gradient_norm == pytest.approx(5.0)
    assert seen[0].flatten().tolist() == pytest.approx(moved)


def test_what_requires_no_gradient_stays_as_it_is():
    model = Small()
    model.first.requires_grad_(False)
    before = weights(model)
    run(model)
    assert torch.equal(model.first.weight, before["first.weight"]) and not torch.equal(model.second.weight, before["second.weight"])


# --- the curve, and what is told -------------------------------------------------------------------------------------------------------------


def test_the_curve_begins_before_training_and_ends_with_it():
    model = Small(dropout=0.0)
    evaluations = []

    def evaluate():
        evaluations.append(model.training or torch.is_grad_enabled())
        x, y = data(99, 50)
        return {"error": (model(x) - y).square().mean()}

    seen: list[Progress] = []
    losses = []

    def objective(part):
        loss = of(model)(part)
        losses.append(float(loss.total.detach()) / loss.tokens)
        return loss

    settings = QUICK._replace(steps=10, record_every=2, evaluate_every=4)
    points = train(model, lambda step: [data(step)], objective, settings, evaluate=evaluate, progress=seen.append)
    assert [(point.step, point.tokens) for point in points] == [(step, 6 * step) for step in (0, 2, 4, 6, 8, 10)]
    assert [point.step for point in points if point.metrics] == [0, 4, 8, 10] and evaluations == [False] * 4
    assert points[0].loss is None and points[0].gradient_norm is None
    assert [point.loss for point in points[1:]] == pytest.approx([sum(losses[at : at + 2]) / 2 for at in range(0, 10, 2)])
    assert points[-1].metrics["error"] < 0.7 * points[0].metrics["error"]
    assert [each.step for each in seen] == list(range(1, 11)) and seen[-1].seconds_left == 0 and seen[0].tokens_s > 0
    assert not model.training
    assert json.loads(json.dumps([point._asdict() for point in points], allow_nan=False))


def test_the_seed_decides_the_run_and_the_global_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models = [Small() for _ in range(3)]
    torch.manual_seed(5)
    for model, seed in zip(models, (1, 1, 2), strict=True):
        run(model, QUICK._replace(seed=seed))
    assert torch.equal(torch.rand(3), expected)
    assert same(weights(models[0]), weights(models[1])) and not same(weights(models[0]), weights(models[2]))


# --- going on --------------------------------------------------------------------------------------------------------------------------------


class Killed(Exception):  # noqa: N818
    pass


def killing(at: int):
    def progress(now: Progress) -> None:
        if now.step == at:
            raise Killed

    return progress


@pytest.mark.parametrize("at", [1, 4, 7, 11])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights_and_the_same_curve(at, tmp_path):
    whole = Small()
    expected = run(whole)
    with pytest.raises(Killed):
        run(Small(), state=tmp_path, progress=killing(at))
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{at:09d}"]
    later, seen = Small(seed=3), []
    points = run(later, state=tmp_path, progress=seen.append)
    assert seen[0].step == at + 1  # nothing is done twice
    assert same(weights(later), weights(whole)) and points == expected


def test_a_run_stopped_twice_and_in_the_middle_of_saving_goes_on(tmp_path, monkeypatch):
    whole = Small()
    expected = run(whole)
    with pytest.raises(Killed):
        run(Small(), state=tmp_path, progress=killing(3))
    rename = Path.rename

    def stop(self, target):
        if Path(target).name == "step-000000007":
            raise Killed
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(Killed):
        run(Small(), state=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000006", "unfinished"}
    monkeypatch.undo()
    later = Small(seed=9)
    assert run(later, state=tmp_path) == expected and same(weights(later), weights(whole))


def test_a_killed_process_leaves_a_state_that_is_gone_on_from(tmp_path):
    program = f"""
import os, signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from test_loop import QUICK, Small, run
run(Small(), state=__import__("pathlib").Path({str(tmp_path)!r}), progress=lambda now: os.kill(os.getpid(), signal.SIGKILL) if now.step == 6 else None)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    whole, later = Small(), Small(seed=3)
    expected = run(whole)
    assert run(later, state=tmp_path) == expected
    assert all(torch.allclose(weights(later)[name], tensor, atol=1e-6) for name, tensor in weights(whole).items())


def test_a_state_is_safetensors_and_json_and_nothing_else(tmp_path):
    with pytest.raises(Killed):
        run(Small(), state=tmp_path, progress=killing(5))
    files = {path.name for path in (tmp_path / "step-000000005").iterdir()}
    assert files == {states.TENSORS, states.FACTS}
    facts = json.loads((tmp_path / "step-000000005" / states.FACTS).read_text())
    assert facts["step"] == 5 and facts["tokens"] == 30 and [Point(**point).step for point in facts["points"]] == [0, 4]


def test_states_are_saved_after_so_many_seconds_and_not_at_the_end(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(states, "save", lambda directory, step, tensors, facts: saved.append(step))
    run(Small(), QUICK._replace(save_seconds=1e6), state=tmp_path)
    assert saved == []
    run(Small(), QUICK, state=tmp_path)
    assert saved == list(range(1, 12))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"settings": QUICK._replace(learning_rate=0.01)}, r"settings \{'steps': 12, 'learning_rate': 0\.01"),
        ({"run": {"text": "other"}}, r"text 'other' \(there 'this'\)"),
        ({"model": nn.Linear(4, 1)}, r"first\.bias \[1\] \(there absent\)|another run: first\.bias absent"),
    ],
)
def test_the_state_of_another_run_is_refused(change, says, tmp_path):
    with pytest.raises(Killed):
        run(Small(), state=tmp_path, run={"text": "this"}, progress=killing(2))
    arguments = {"model": Small(), "settings": QUICK, "run": {"text": "this"}, **change}
    with pytest.raises(ValueError, match=says) as caught:
        run(state=tmp_path, **arguments)
    assert "Give each run a directory of its own" in str(caught.value)


def test_how_often_a_state_is_saved_is_no_part_of_the_run(tmp_path):
    with pytest.raises(Killed):
        run(Small(), state=tmp_path, progress=killing(2))
    run(Small(), QUICK._replace(save_seconds=7.0), state=tmp_path)


# --- what cannot be --------------------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run_and_says_what_would_help(tmp_path):
    model = Small()

    def objective(part):
        total, tokens = of(model)(part)
        return Loss(total * (math.nan if len(seen) == 6 else 1), tokens)

    seen: list[Progress] = []
    with pytest.raises(DivergedError, match=r"diverged at step 7 of 12: the loss is nan, after a loss of [\d.]+, at a learning rate of"):
        train(model, lambda step: [data(step)], objective, QUICK, state=tmp_path, progress=seen.append)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000006"]
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())  # nothing was updated with it


def test_a_gradient_that_is_not_finite_stops_the_run_too():
    model = nn.Linear(2, 1)
    root = lambda part: Loss((model(part) * 0).abs().sqrt().sum(), 1)  # noqa: E731  # 0, but its slope is 0 · ∞
    with pytest.raises(DivergedError, match=r"step 1 of 12: the loss is 0 and its gradient nan, in the first step"):
        train(model, lambda step: [torch.ones(1, 2)], root, QUICK)


def test_a_run_at_a_rate_that_diverges_is_told_so():
    model = nn.Linear(4, 1)
    cubed = lambda part: Loss((model(part[0]) - part[1]).pow(8).sum(), 6)  # noqa: E731
    with pytest.raises(DivergedError, match=r"A lower learning rate than 1e\+06"):
        train(model, lambda step: [data(step)], cubed, Settings(steps=50, learning_rate=1e6))


def test_weights_too_narrow_for_small_updates_are_refused():
    with pytest.raises(ValueError, match=r"second\.weight is torch\.bfloat16, in which small updates are rounded away"):
        model = Small()
        model.second.bfloat16()
        run(model)
    with pytest.raises(ValueError, match="no parameter of Small requires a gradient"):
        run(Small().requires_grad_(False))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "at least one step"), ({"warmup_steps": 12}, "a shorter warm-up"), ({"learning_rate": 0.0}, "finite numbers above 0"),
        ({"learning_rate": math.inf}, "finite numbers above 0"), ({"clip": 0.0}, "finite numbers above 0"),
        ({"evaluate_every": 6}, "is no multiple of record_every=4"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_before_anything_is_trained(wrong, says):
    model = Small()
    before = weights(model)
    with pytest.raises(ValueError, match=says):
        run(model, QUICK._replace(**wrong))
    assert same(weights(model), before)


def test_a_step_without_a_token_is_refused():
    model = Small()
    with pytest.raises(ValueError, match="step 1 has no token to learn from"):
        train(model, lambda step: [data(0, rows=0)], of(model), QUICK)


def test_zeros_count_for_no_norm_and_are_never_moved():
    """Of the gradient (3, −4) the second stays out, so its norm is 3, and the weight that is 0 stays so."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0]]))
    settings = Settings(steps=3, learning_rate=0.1, weight_decay=0.5, clip=0.5, record_every=1, evaluate_every=1)
    zeros = {"weight": torch.tensor([[False, True]])}
    points = train(model, lambda step: [torch.tensor([[3.0, -4.0]])], lambda part: Loss(model(part).sum(), 1), settings, zeros=zeros)
    assert [point.gradient_norm for point in points[1:]] == pytest.approx([3.0] * 3)
    assert model.weight[0, 1] == 0 and model.weight[0, 0] < 0.8


def rising(losses, **settings):
    """A run whose loss at each step is the given one, whatever the weights."""
    model = nn.Linear(1, 1, bias=False)

    def objective(part):
        return Loss(model(torch.zeros(1, 1)).sum() + part, 1)

    asked = Settings(steps=len(losses), learning_rate=1e-3, record_every=1, evaluate_every=1, **settings)
    return train(model, lambda step: [torch.tensor(losses[step])], objective, asked)


def test_a_loss_far_above_its_lowest_ends_the_run_after_the_warm_up():
    with pytest.raises(
        DivergedError, match=r"diverged by step 3 of 4: the loss rose to 3 from 1, .* at most 2 times .* A lower learning rate than 0\.001"
    ):
        rising([4.0, 1.0, 3.0, 1.0], stop_above=2.0)
    assert len(rising([4.0, 1.0, 3.0, 1.0])) == 5  # it has to be asked for
    assert len(rising([1.0, 3.0, 1.0, 1.5], stop_above=2.0, warmup_steps=2)) == 5
    assert len(rising([1e-4, 1e-2, 5e-2], stop_above=2.0)) == 4  # a rise by nearly nothing is none
    with pytest.raises(ValueError, match=r"stop_above=1\.0 times the lowest loss; a factor above 1"):
        rising([1.0], stop_above=1.0)


def test_a_parameter_with_a_rate_of_its_own_moves_by_it_and_does_not_decay():
    """AdamW's first step is the rate: 0.01 for the one, 5 times that for the other."""
    model = nn.ModuleDict({"plain": nn.Linear(1, 1, bias=False), "gates": nn.Linear(1, 1, bias=False)})
    before = weights(model)
    settings = Settings(steps=1, learning_rate=0.01, weight_decay=0.5, record_every=1, evaluate_every=1)
    one = torch.ones(1, 1)
    curve = []
    points = train(
        model,
        lambda step: [one],
        lambda part: Loss(sum(each(part).sum() for each in model.values()), 1),
        settings,
        rates={"gates.": 5.0},
        curve=curve,
    )
    assert torch.allclose(model["plain"].weight, before["plain.weight"] * (1 - 0.01 * 0.5) - 0.01, atol=1e-6)
    assert torch.allclose(model["gates"].weight, before["gates.weight"] - 0.05, atol=1e-6)
    assert points is curve and len(curve) == 2


def test_the_curve_that_batches_see_is_the_one_that_is_returned(tmp_path):
    """Also of a run that goes on: the points before the stop are there when the first batch is asked for."""
    seen = []

    def go(curve, **more):
        model = Small(dropout=0.0)

        def batches(step):
            seen.append((step, [point.step for point in curve]))
            return [data(step)]

        return train(model, batches, of(model), QUICK, curve=curve, **more)

    with pytest.raises(Killed):
        go([], state=tmp_path, progress=killing(9))
    before = list(seen)
    seen.clear()
    points = go([], state=tmp_path)
    assert before[4] == (4, [0, 4]) and seen[0] == (9, [0, 4, 8]) and [point.step for point in points] == [0, 4, 8, 12]
