"""The steps ``prune_learned`` and ``pretrain``: what is written is what was trained, of the shape that was asked for."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from assay.ops.models.checkpoint import load_model
from assay.ops.models.structure import shape_numbers
from assay.ops.steps.domains import reading_of
from assay.ops.steps.pretrain import pretrain
from assay.ops.steps.prune_learned import prune_learned
from assay.ops.steps.training import texts_of
from assay.ops.train.scratch import Shape, parameters
from assay.schemas.texts import Text
from assay.schemas.training import Domain, Pretrain, PruneLearned

LESSON = {"tokens": 2000, "batch": 4, "length": 32, "learning_rate": 1e-3}


def windows(_text, count, length):
    return torch.randint(3, 98, (count, length), generator=torch.Generator().manual_seed(0))


def counting(_text, count, length):
    """Text in which each id follows from the one before."""
    return 3 + (torch.arange(count)[:, None] * 7 + torch.arange(length)) % 95


@pytest.fixture(scope="module")
def base(teacher_of, save_checkpoint_dir, tmp_path_factory):
    return save_checkpoint_dir(teacher_of(vocab=98), tmp_path_factory.mktemp("bases") / "base")


def log_perplexity(directory, step, text=windows):
    return loss(directory, texts_of(step, text)[1])


def loss(directory, held_out):
    with torch.no_grad():
        logits = load_model(directory, dtype=torch.float32)(held_out).logits[:, :-1, :98]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten()))


@pytest.mark.parametrize(
    "target",
    [{"layers": 2}, {"ffn": 40}, {"hidden": 24}, {"kv_groups": 1}, {"layers": 2, "ffn": 40, "kv_groups": 1, "hidden": 24}],
    ids=str,
)
def test_what_is_cut_says_what_the_masked_model_said(target, base, tmp_path):
    step, before = PruneLearned(**LESSON, **target), shape_numbers(load_model(base))
    told = prune_learned(step, base, tmp_path, windows=windows)
    named = {"layers": "layers", "ffn": "intermediate_size", "hidden": "hidden_size", "kv_groups": "kv_heads"}
    after = shape_numbers(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert after == told["after"] and {name: after[named[name]] for name in target} == target
    assert {name: after[name] for name in before if name not in (*map(named.get, target), "heads")} == {
        name: before[name] for name in before if name not in (*map(named.get, target), "heads")
    }
    assert log_perplexity(tmp_path, step) == pytest.approx(told["curve"][-1]["metrics"]["log_perplexity"], abs=1e-4)


def test_domains_are_compared_with_the_model_before_it_was_pruned(base, tmp_path):
    texts = Domain(text=Text(name="wikipedia"), share_pct=50), Domain(text=Text(path="lists.txt"), share_pct=50)
    step = PruneLearned(**LESSON, ffn=40, domains=texts)
    both = lambda text, *size: (counting if text.path else windows)(text, *size)  # noqa: E731
    told = prune_learned(step, base, tmp_path, windows=both)
    _, held_out, domains = reading_of(step, both)
    curve = [point["metrics"] for point in told["curve"] if point["metrics"]]
    for number in (0, 1):
        own = held_out[domains.held_out == number]
        assert all(point[f"base_log_perplexity_domain_{number}"] == pytest.approx(loss(base, own), abs=1e-4) for point in curve)
        assert curve[-1][f"log_perplexity_domain_{number}"] == pytest.approx(
            loss(tmp_path, own), abs=1e-4
        )  # with the hard masks, as it was cut
    assert told["domains"] == ["wikipedia", "lists.txt"] and curve[0]["weight_domain_0"] == 0.5
    assert all(point["weight_domain_0"] + point["weight_domain_1"] == pytest.approx(1) for point in curve)


def test_more_than_there_is_is_refused_before_anything_is_trained(base, tmp_path):
    with pytest.raises(ValueError, match="kv_groups"):
        prune_learned(PruneLearned(**LESSON, kv_groups=9), base, tmp_path, windows=lambda *_: pytest.fail("read"))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("size", [{"ffn": 48}, {"parameters": 20_000}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_from_nothing_has_the_shape_that_was_asked_for_and_learns(size, tied, base, tmp_path):
    step = Pretrain(**LESSON | {"learning_rate": 1e-2}, layers=2, hidden=32, heads=4, kv_heads=2, tied=tied, **size)
    told = pretrain(step, base, tmp_path, windows=counting)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert shape_numbers(model)["tied"] is tied and sum(each.numel() for each in model.parameters()) == told["parameters"]
    assert told["parameters"] == parameters(Shape(**told["shape"])) and ("parameters" not in size or told["parameters"] <= 20_000)
    curve = json.loads((tmp_path / "curve.json").read_text())["curve"]
    assert curve[-1]["metrics"]["log_perplexity"] < curve[0]["metrics"]["log_perplexity"] - 0.3
    assert log_perplexity(tmp_path, step, counting) == pytest.approx(curve[-1]["metrics"]["log_perplexity"], abs=1e-4)
