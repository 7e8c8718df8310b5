"""Which domain is read goes by the losses of the evaluations: weights by hand and by law, windows in turn, and the same after a stop."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.evaluate.divergence import head_of
from assay.ops.models.early_exit import early_exit
from assay.ops.train.domains import LOSS, REFERENCE, WEIGHT, Domains, losses_of, reader, reweighted, weights_at, with_weights
from assay.ops.train.loop import Point, Settings
from assay.ops.train.recover import Objective, recover

TWO = Domains(torch.tensor([0, 1, 1, 0, 1, 0, 1, 1]), torch.tensor([0, 1, 1]), (1.0, 1.0))


def point(step, *losses, references=(2.0, 3.0)):
    found = {f"{LOSS}{domain}": loss for domain, loss in enumerate(losses)}
    return Point(step, 0, 1.0, 0.1, 1.0, found | {f"{REFERENCE}{domain}": loss for domain, loss in enumerate(references)})


def test_weights_worked_by_hand():
    """The first is 0.5 nats above its reference and the second below its own: ½ e^½ : ½."""
    found = reweighted(torch.tensor([0.5, 0.5], dtype=torch.float64), [2.5, 1.0], [2.0, 3.0])
    assert found.tolist() == pytest.approx([math.exp(0.5) / (math.exp(0.5) + 1), 1 / (math.exp(0.5) + 1)])


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6))
def test_weights_add_up_and_rise_only_where_a_loss_is_above_its_reference(numbers):
    weights, losses, references = (list(each) for each in zip(*numbers, strict=True))
    before = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    found = reweighted(before, losses, references)
    assert found.sum().item() == pytest.approx(1) and (found > 0).all()
    excess = [max(loss - reference, 0) for loss, reference in zip(losses, references, strict=True)]
    if not any(excess):
        assert torch.allclose(found, before)
    most = max(range(len(excess)), key=lambda domain: excess[domain])
    assert found[most] >= before[most] * (1 - 1e-9)


def test_each_evaluation_counts_from_its_step_on_and_the_one_before_training_never():
    curve = [point(0, 9.0, 3.0), point(4, 3.0, 3.0), Point(6, 0, 1.0, 0.1, 1.0, {}), point(8, 3.0, 3.0)]
    share = [weights_at(TWO, curve, step)[0].item() for step in (0, 3, 4, 7, 8)]
    once, twice = math.e / (math.e + 1), math.e**2 / (math.e**2 + 1)
    assert share == pytest.approx([0.5, 0.5, once, once, twice])
    assert weights_at(TWO._replace(shares=(1.0, 3.0)), [], 0).tolist() == [0.25, 0.75]
    told = [[each.metrics.get(f"{WEIGHT}{domain}") for domain in (0, 1)] for each in with_weights(TWO, curve)]
    assert told == [[0.5, 0.5], pytest.approx([once, 1 - once]), [None, None], pytest.approx([twice, 1 - twice])]


def test_the_windows_of_a_domain_are_read_in_turn_and_domains_by_their_weights():
    at = reader(TWO, [], windows=8, rows=4, seed=0)
    read = torch.cat([at(step) for step in range(150)]).tolist()
    for members in ({0, 3, 5}, {1, 2, 4, 6, 7}):
        own = [window for window in read if window in members]
        for begin in range(0, len(own) - len(members), len(members)):
            assert set(own[begin : begin + len(members)]) == members
    assert sum(window in {0, 3, 5} for window in read) / len(read) == pytest.approx(0.5, abs=0.08)  # of 600 draws: 4 deviations
    far = [point(1, 4.0, 3.0)]  # 2 nats above
    at = reader(TWO, far, windows=8, rows=4, seed=0)
    drawn = torch.cat([at(step) for step in range(1, 100)]).tolist()
    assert sum(window in {0, 3, 5} for window in drawn) / len(drawn) == pytest.approx(math.e**2 / (math.e**2 + 1), abs=0.065)


def test_a_reader_that_begins_later_reads_the_same():
    curve = [point(2, 2.7, 3.0), point(4, 2.2, 3.9)]
    at = reader(TWO, curve, windows=8, rows=3, seed=1)
    expected = [at(step).tolist() for step in range(8)]
    assert reader(TWO, curve, windows=8, rows=3, seed=1)(7).tolist() == expected[7]
    assert reader(TWO, curve, windows=8, rows=3, seed=2)(7).tolist() != expected[7]


def test_domains_that_are_none_are_refused(teacher_of, text):
    with pytest.raises(ValueError, match=r"3 domains have \[3, 5, 0\] of 8 windows; each window in one of them, and at least one in each"):
        reader(TWO._replace(shares=(1.0, 1.0, 1.0)), [], windows=8, rows=1, seed=0)
    with pytest.raises(ValueError, match=r"\[3, 5\] of 9 windows"):
        reader(TWO, [], windows=9, rows=1, seed=0)
    with pytest.raises(ValueError, match=r"shares of the domains are \[1\.0, 0\.0\]; numbers above 0"):
        reader(TWO._replace(shares=(1.0, 0.0)), [], windows=8, rows=1, seed=0)
    model, held_out = teacher_of(), text(3)
    with pytest.raises(ValueError, match="domain 1 has no held-out window"):
        losses_of(TWO._replace(held_out=torch.zeros(3, dtype=torch.int64)), held_out, torch.zeros(3, 24, 32), head_of(model), vocabulary=64)


def counting(windows, length=24):
    """Text in which each id follows from the one before, so that a student learns it at once."""
    return 3 + (torch.arange(windows)[:, None] * 7 + torch.arange(length)) % 61


def test_recovery_reads_more_of_the_domain_that_is_behind_and_goes_on_after_a_stop(teacher_of, text, tmp_path):
    """A teacher that knows nothing of either; by cross-entropy domain 0 is learned to below it, domain 1 is random ids and is not."""
    teacher = teacher_of()
    windows, held_out = text(40), text(4, seed=1)
    windows[::2], held_out[::2] = counting(20), counting(2)
    domains = Domains(torch.arange(40) % 2, torch.tensor([0, 1, 0, 1]), (1.0, 1.0))
    asked = Settings(steps=20, learning_rate=1e-2, record_every=4, evaluate_every=4, save_seconds=0.0)
    seen = []

    def run(**more):
        student = early_exit(copy.deepcopy(teacher), 1)
        with torch.no_grad():
            student.lm_head.weight.mul_(3)  # further from random ids than the teacher is
        hook = student.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"]) if module.training else None, with_kwargs=True
        )
        points = recover(
            student, teacher, windows, held_out, objective=Objective("cross_entropy"), settings=asked, rows=4, domains=domains, **more
        )
        hook.remove()
        return student, points

    whole, expected = run()
    for said, model in ((LOSS, whole), (REFERENCE, teacher)):
        for domain in (0, 1):
            ids = held_out[domain::2]
            with torch.no_grad():
                nll = -model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean().item()
            assert expected[-1].metrics[f"{said}{domain}"] == pytest.approx(nll, rel=1e-4)
    weights = [[each.metrics[f"{WEIGHT}{domain}"] for domain in (0, 1)] for each in expected]
    assert weights[0] == [0.5, 0.5] and all(sum(each) == pytest.approx(1) for each in weights) and weights[-1][1] > 0.9
    read = [int(windows.eq(row).all(1).nonzero()[0]) % 2 for ids in seen[-12:] for row in ids]
    assert sum(read) / len(read) > 0.75

    def stop(now):
        if now.step == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(state=tmp_path, progress=stop)
    later, found = run(state=tmp_path)
    assert found == expected and all(torch.equal(mine, theirs) for mine, theirs in zip(later.parameters(), whole.parameters(), strict=True))
