"""DistillSpec on a small teacher: the overlap rises, the teacher reads each batch once, the student's own samples have their share."""

import copy
import json

import pytest
import torch

from assay.ops.models.early_exit import early_exit
from assay.ops.train import passes, recover
from assay.ops.train.draft import distill, eos_of, require_same_tokens
from assay.ops.train.loop import Settings

EVERY = ["forward_kl", "reverse_kl", "total_variation", "jensen_shannon"]
FEW = Settings(steps=30, learning_rate=1e-2, warmup_steps=3, record_every=10, evaluate_every=30)


@pytest.fixture(scope="module")
def teacher(teacher_of):
    return teacher_of()


@pytest.fixture
def student(teacher):
    return early_exit(copy.deepcopy(teacher), 1)


@pytest.mark.parametrize("loss", EVERY)
def test_in_a_few_dozen_steps_the_loss_falls_and_the_overlap_rises(loss, teacher, student, text):
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    points = distill(student, teacher, text(240), text(16, seed=1), loss=loss, settings=FEW)
    first, last = points[0].metrics, points[-1].metrics
    assert points[-1].loss < 0.75 * points[1].loss
    assert last["overlap"] > first["overlap"] + 0.08 and last["kl_nats"] < 0.5 * first["kl_nats"]
    assert last["top1_agreement"] > first["top1_agreement"]
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert json.loads(json.dumps([point._asdict() for point in points], allow_nan=False))


def test_the_loss_of_a_step_is_the_mean_over_every_position(teacher, student, text):
    windows = text(4)
    with torch.no_grad():
        p, q = (model(windows).logits.log_softmax(-1) for model in (teacher, student))
        expected = (p.exp() * (p - q)).sum(-1).mean().item()
    settings = FEW._replace(steps=1, warmup_steps=0, record_every=1, evaluate_every=1)
    points = distill(student, teacher, windows, text(2, seed=1), rows=4, settings=settings)
    assert points[-1].loss == pytest.approx(expected, rel=1e-4) and points[-1].tokens == windows.numel()


def test_a_batch_larger_than_a_forward_is_accumulated_to_the_same_step(teacher, student, text, monkeypatch):
    settings = FEW._replace(steps=3, warmup_steps=0)
    other = copy.deepcopy(student)
    whole = distill(student, teacher, text(24), text(4, seed=1), settings=settings)
    monkeypatch.setattr(passes, "FORWARD_TOKENS", 50)  # two rows of 24
    parts = distill(other, teacher, text(24), text(4, seed=1), settings=settings)
    assert parts[-1].loss == pytest.approx(whole[-1].loss, rel=1e-4)
    for mine, theirs in zip(student.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_the_teacher_reads_each_batch_once_and_without_gradient(teacher, student, text):
    seen = {"teacher": [], "student": []}
    hooks = [
        model.base_model.register_forward_hook(lambda module, args, output, name=name: seen[name].append(output.last_hidden_state))
        for name, model in (("teacher", teacher), ("student", student))
    ]
    distill(student, teacher, text(40, 20), text(3, 24, seed=1), rows=4, settings=FEW._replace(steps=7))
    for hook in hooks:
        hook.remove()
    batches = {name: [states for states in found if states.shape[:2] == (4, 20)] for name, found in seen.items()}
    assert len(batches["teacher"]) == len(batches["student"]) == 7
    assert not any(states.requires_grad for states in batches["teacher"]) and all(states.requires_grad for states in batches["student"])
    assert len([states for states in seen["teacher"] if states.shape[:2] == (3, 24)]) == 1  # the held-out text too


@pytest.mark.parametrize(("pct", "rows", "steps"), [(0, 4, 3), (25, 4, 4), (30, 5, 4), (100, 4, 2)])
def test_the_share_of_rows_that_the_student_writes_is_the_declared_one(pct, rows, steps, teacher, student, text):
    asked = []

    def sample(model, prompts, new_tokens, random):
        assert model is student and not model.training and not torch.is_grad_enabled()
        asked.append((len(prompts), prompts.shape[1], new_tokens))
        return torch.cat([prompts, torch.full((len(prompts), new_tokens), 7)], dim=1)

    settings = FEW._replace(steps=steps, warmup_steps=0)
    distill(student, teacher, text(40), text(2, seed=1), on_policy_pct=pct, rows=rows, settings=settings, sample=sample, prefix=5)
    assert sum(count for count, _, _ in asked) == rows * steps * pct // 100
    assert {(prefix, new) for _, prefix, new in asked} <= {(5, 19)}


def test_the_student_goes_on_from_beginnings_of_the_text_and_learns_where_it_went(teacher, student, text, monkeypatch):
    windows = text(6)
    batches = []
    monkeypatch.setattr(recover, "split", lambda batch, tokens: batches.append(batch) or [batch])
    settings = FEW._replace(steps=2, warmup_steps=0)
    distill(student, teacher, windows, text(2, seed=1), on_policy_pct=50, rows=4, settings=settings)
    assert len(batches) == 2
    for batch in batches:
        whole = [(row == windows).all(dim=1).any().item() for row in batch.ids]
        begun = [(row[:6] == windows[:, :6]).all(dim=1).any().item() for row in batch.ids]
        assert whole == [True, False, True, False] and all(begun)  # the first quarter of 24 tokens is kept


def test_what_follows_a_sampled_end_changes_nothing(teacher, student, text):
    def ending_in(last):
        def sample(model, prompts, new_tokens, random):
            rest = torch.tensor([9, 2, *[last] * (new_tokens - 2)])
            return torch.cat([prompts, rest.expand(len(prompts), -1)], dim=1)

        return sample

    found = []
    for last in (7, 50):
        model = copy.deepcopy(student)
        settings = FEW._replace(steps=2, warmup_steps=0)
        points = distill(
            model,
            teacher,
            text(8),
            text(2, seed=1),
            on_policy_pct=100,
            rows=4,
            settings=settings,
            sample=ending_in(last),
            eos_ids={2},
            prefix=6,
        )
        found.append((points[-1].loss, points[-1].tokens))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][1] == 2 * 4 * 7  # the prefix and the token before the end


def test_a_resumed_run_with_its_own_samples_equals_one_that_was_not_stopped(teacher, student, text, tmp_path):
    settings = FEW._replace(steps=8, record_every=2, evaluate_every=4, save_seconds=0.0)
    arguments = {"on_policy_pct": 50, "rows": 4, "settings": settings}
    whole = copy.deepcopy(student)
    expected = distill(whole, teacher, text(24), text(4, seed=1), **arguments)

    def stop(now):
        if now.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(copy.deepcopy(student), teacher, text(24), text(4, seed=1), state=tmp_path, progress=stop, **arguments)
    later = copy.deepcopy(student)
    found = distill(later, teacher, text(24), text(4, seed=1), state=tmp_path, **arguments)
    assert found == expected
    assert all(torch.allclose(mine, theirs, atol=1e-7) for mine, theirs in zip(later.parameters(), whole.parameters(), strict=True))
    with pytest.raises(ValueError, match="the state of another run: text"):
        with pytest.raises(KeyboardInterrupt):
            distill(copy.deepcopy(student), teacher, text(24), text(4, seed=1), state=tmp_path / "b", progress=stop, **arguments)
        distill(later, teacher, text(24, seed=5), text(4, seed=1), state=tmp_path / "b", **arguments)


def test_the_seed_decides_order_and_samples(teacher, student, text):
    found = []
    for seed in (0, 0, 1):
        model = copy.deepcopy(student)
        points = distill(
            model, teacher, text(24), text(2, seed=1), on_policy_pct=50, rows=4, settings=FEW._replace(steps=2, warmup_steps=0, seed=seed)
        )
        found.append(points[-1].loss)
    assert found[0] == found[1] != found[2]


# --- vocabularies ----------------------------------------------------------------------------------------------------------------------------


def test_a_teacher_with_a_padded_vocabulary_teaches_the_ids_that_both_have(teacher_of, student, teacher, text):
    """The teacher's head has 72 rows where the student's has 64, and puts its mass on id 70, which no text has."""
    padded = teacher_of(vocab=72)
    state = padded.state_dict()
    for name, tensor in teacher.state_dict().items():
        state[name][: len(tensor)] = tensor
    state["lm_head.weight"][70] = 10 * state["lm_head.weight"][3]
    points = [
        distill(copy.deepcopy(student), each, text(24), text(4, seed=1), settings=FEW._replace(steps=3, warmup_steps=0), vocabulary=64)
        for each in (teacher, padded)
    ]
    assert points[0][-1].loss == pytest.approx(points[1][-1].loss, rel=1e-4)
    assert points[0][-1].metrics == pytest.approx(points[1][-1].metrics, rel=1e-4)


def test_different_tokenizers_are_refused_and_the_same_tokens_are_not(save_checkpoint_dir, make_llama, tmp_path):
    from assay.ops.models.checkpoint import load_tokenizer

    one, same, other = (
        load_tokenizer(save_checkpoint_dir(make_llama(layers=1, vocab=vocab), tmp_path / str(number)))
        for number, vocab in enumerate((128, 136, 64))
    )
    require_same_tokens(one, same)
    with pytest.raises(ValueError, match=r"the draft's tokenizer \(64 tokens\) has other tokens than the target's \(\d+\)"):
        require_same_tokens(one, other)


# --- ends ----------------------------------------------------------------------------------------------------------------------------------


def test_the_ends_of_a_text_are_those_of_the_generation_config(teacher):
    assert eos_of(teacher) == {2}
    other = copy.deepcopy(teacher)
    other.generation_config.eos_token_id = [2, 7]
    assert eos_of(other) == {2, 7}
    other.generation_config.eos_token_id = None
    assert eos_of(other) == frozenset()


def test_a_prefix_that_leaves_nothing_to_sample_is_refused(teacher, student, text):
    for prefix in (0, 24):
        with pytest.raises(ValueError, match=rf"a prefix of {prefix} tokens in windows of 24; 1 to 23 leave something to sample"):
            distill(student, teacher, text(8), text(2), on_policy_pct=10, prefix=prefix, settings=FEW)
