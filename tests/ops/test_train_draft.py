"""From the spec of a draft's model to a checkpoint."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from assay.ops.apply import early_exit_draft, train_draft
from assay.ops.models.checkpoint import load_model, load_tokenizer, weights_path
from assay.ops.models.early_exit import write_early_exit
from assay.ops.steps.quantize import rtn
from assay.ops.steps.training import HELD_OUT_TOKENS, Running
from assay.ops.train.losses import divergence
from assay.ops.train.overlap import overlap_with
from assay.schemas.rounding import Quantize
from assay.schemas.steps import DraftModel
from assay.schemas.texts import Text
from assay.schemas.training import DraftDistill

LESSON = DraftDistill(tokens=1250, batch=4, length=16, learning_rate=1e-2, text=Text(path="text.txt"))
EVERY = {"forward_kl", "reverse_kl", "total_variation", "jensen_shannon"}
FIRST = DraftModel(early_exit=1, distill=LESSON)


def windows(text: Text, count: int, length: int) -> torch.Tensor:
    assert text == LESSON.text
    return torch.randint(3, 98, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def target(tmp_path, teacher_of, save_checkpoint_dir):
    return save_checkpoint_dir(teacher_of(vocab=98).bfloat16(), tmp_path / "target")


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def overlap(target, draft):
    held_out = windows(LESSON.text, 20 * 4 + HELD_OUT_TOKENS // 16 + 1, 16)[80:]
    return overlap_with(load_model(target, dtype=torch.float32), held_out, vocabulary=98)(load_model(draft, dtype=torch.float32))


def test_the_first_blocks_are_trained_and_written_as_a_normal_checkpoint(target, out):
    told = train_draft(FIRST, target, None, out, windows=windows, running=Running(seed=3))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert (told["steps"], told["tokens"], told["layers"]) == (20, 1280, 1)  # 1,250 tokens in steps of 64, rounded up
    assert told["held_out_tokens"] >= HELD_OUT_TOKENS
    assert told["after"]["overlap"] > told["before"]["overlap"] + 0.05
    assert told["curve"][0]["metrics"] == told["before"] and told["curve"][-1]["metrics"] == told["after"]
    assert told["stored"] == pytest.approx(overlap(target, out)._asdict())
    assert told["stored"] == pytest.approx(told["after"], abs=0.01)  # bfloat16
    assert load_model(out).dtype == torch.bfloat16 and load_model(out).config.num_hidden_layers == 1
    assert load_tokenizer(out)("one 2")["input_ids"] == load_tokenizer(target)("one 2")["input_ids"]


def test_a_draft_is_trained_toward_its_target_and_stays_as_it_was(target, out, tmp_path):
    (tmp_path / "draft").mkdir()
    write_early_exit(target, tmp_path / "draft", 2)
    before = load_file(tmp_path / "draft" / "model.safetensors")
    told = train_draft(DraftModel(distill=LESSON), target, tmp_path / "draft", out, windows=windows)
    assert told["layers"] == 2 and told["stored"]["overlap"] > told["before"]["overlap"]
    assert told["before"] == pytest.approx(overlap(target, tmp_path / "draft")._asdict(), abs=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in load_file(tmp_path / "draft" / "model.safetensors").items())


def test_a_trained_draft_is_packed_when_that_is_asked_and_says_what_it_lost(target, out):
    lesson = LESSON.model_copy(update={"quantize": Quantize(format="int4", group_size=32)})
    told = train_draft(DraftModel(early_exit=1, distill=lesson), target, None, out, windows=windows)
    assert weights_path(out) == "dequantized" and (told["packed"]["forms"], told["packed"]["coverage"]) == (["int4"], 1.0)
    assert told["stored"]["overlap"] < told["after"]["overlap"]
    assert told["stored"] == pytest.approx(overlap(target, out)._asdict())


def test_the_same_step_writes_the_same_bytes_and_another_seed_others(target, tmp_path):
    step, written = DraftModel(early_exit=1, distill=LESSON.model_copy(update={"tokens": 256, "on_policy_pct": 50})), []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        train_draft(step, target, None, tmp_path / name, windows=windows, running=Running(seed=seed))
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert written[0] == written[1] and written[0]["model.safetensors"] != written[2]["model.safetensors"]


@pytest.mark.parametrize("loss", ["reverse_kl", "jensen_shannon"])
def test_the_loss_that_is_named_is_the_one_that_is_used(loss, target, tmp_path):
    (tmp_path / "cut").mkdir()
    write_early_exit(target, tmp_path / "cut", 1)
    read = windows(LESSON.text, 4 + HELD_OUT_TOKENS // 16 + 1, 16)[:4]
    with torch.no_grad():
        p, q = (load_model(path, dtype=torch.float32)(read).logits.flatten(0, 1) for path in (target, tmp_path / "cut"))
    expected = divergence(loss, temperature=0.5)(p, q).mean().item()
    (tmp_path / "out").mkdir()
    step = DraftModel(early_exit=1, distill=LESSON.model_copy(update={"tokens": 64, "loss": loss, "temperature": 0.5}))
    assert train_draft(step, target, None, tmp_path / "out", windows=windows)["curve"][-1]["loss"] == pytest.approx(expected, rel=1e-4)
    assert all(divergence(other, temperature=0.5)(p, q).mean().item() != pytest.approx(expected, rel=1e-3) for other in EVERY - {loss})


def test_a_packed_target_is_a_teacher_and_the_start_of_its_own_draft(target, out, tmp_path):
    (tmp_path / "packed").mkdir()
    rtn(Quantize(format="int4", group_size=32), target, tmp_path / "packed")
    told = train_draft(FIRST, tmp_path / "packed", None, out, windows=windows)
    assert weights_path(out) == "dense" and told["stored"]["overlap"] > told["before"]["overlap"]
    (tmp_path / "cut").mkdir()
    assert early_exit_draft(DraftModel(early_exit=2), tmp_path / "packed", tmp_path / "cut")["layers"] == 2
    assert weights_path(tmp_path / "cut") == "dequantized"


def test_a_stopped_training_goes_on_from_its_state(target, out, tmp_path, monkeypatch):
    from assay.ops.train import loop

    def stop(now):
        if now.step == 17:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "Settings", partial(loop.Settings, save_seconds=0.0))
    whole, resumable = train_draft(FIRST, target, None, out, windows=windows), Running(state=tmp_path / "state", run={"key": "k"})
    (tmp_path / "later").mkdir()
    with pytest.raises(KeyboardInterrupt):
        train_draft(FIRST, target, None, tmp_path / "later", windows=windows, running=resumable._replace(progress=stop))
    assert not any((tmp_path / "later").iterdir())
    seen = []
    assert train_draft(FIRST, target, None, tmp_path / "later", windows=windows, running=resumable._replace(progress=seen.append)) == whole
    assert seen[0].step == 18
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "later" / "model.safetensors").read_bytes()


def test_a_quantized_start_and_another_tokenizer_are_refused(target, out, tmp_path, teacher_of, save_checkpoint_dir):
    (tmp_path / "packed").mkdir()
    rtn(Quantize(format="int8", group_size=32), target, tmp_path / "packed")
    with pytest.raises(ValueError, match="distill changes dense weights, but its parent is already quantized"):
        train_draft(DraftModel(distill=LESSON), target, tmp_path / "packed", out, windows=windows)
    stranger = save_checkpoint_dir(teacher_of(vocab=64), tmp_path / "stranger")
    with pytest.raises(ValueError, match=r"the draft's tokenizer \(64 tokens\) has other tokens than the target's \(98\)"):
        train_draft(DraftModel(distill=LESSON), target, stranger, out, windows=windows)
    assert not any(out.iterdir())
