"""The suite on a tiny checkpoint, with a model that finds the code and one that does not; and its picture."""

import io
import json
import re
from datetime import UTC, datetime

import pytest
from matplotlib.image import imread

from assay.ops.evaluate.plots import LIMIT_BYTES
from assay.ops.evaluate.plots_needle import needle_png
from assay.ops.measure import measure
from assay.ops.suites import needle as suite
from assay.ops.suites import subject as opening
from assay.ops.suites.subject import Subject
from assay.schemas.facts import Measurement
from assay.schemas.metrics import METRICS
from assay.schemas.tasks import Needle
from assay.schemas.texts import Text

PROTOCOL = Needle(lengths=(600, 800), depths_pct=(0, 100), prompts=2, haystack=Text(path="text.txt"), max_new_tokens=8, batch=3)


@pytest.fixture(scope="module")
def base(make_llama, save_checkpoint_dir, tmp_path_factory):
    for opened in (opening.model_of, opening.tokenizer_of, opening.runner_of):
        opened.cache_clear()
    directory = save_checkpoint_dir(make_llama(layers=1), tmp_path_factory.mktemp("base"))
    (directory / "text.txt").write_text("The rain fell on the old town. Nobody was out. A cat sat under a cart, and waited! " * 60)
    yield directory
    for opened in (opening.model_of, opening.tokenizer_of, opening.runner_of):
        opened.cache_clear()


def run(protocol, directory):
    result = measure(protocol, Subject(directory, None, None, directory), reference=None, experiment_dir=directory)
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    return result


def values(result):
    return {(row["metric"], row["slice_kind"], row["slice"]): row["value"] for row in result.metrics}


@pytest.fixture
def reading(monkeypatch, base):
    """A model that reads: it follows the chain from the question to the code, and says it after a blank."""
    tokenizer = opening.tokenizer_of(base)

    def install(deep=9, suffix=".\n"):
        def next_tokens(logits, requests, sampling):
            found = []
            for request in requests:
                text = tokenizer.decode(request.text[: request.start])
                name, hops = re.findall(r"The code of the ([a-z ]+) is$", text)[0], 0
                while not name[0].isdigit() and hops < deep:
                    name, hops = re.findall(rf"The code of the {name} is (?:the code of the )?([a-z0-9 ]+)\.", text)[0], hops + 1
                said = f" {name}{suffix}"
                at = len(request.emitted)
                found.append(tokenizer(said[at])["input_ids"][0] if at < len(said) else tokenizer.eos_token_id)
            return found

        monkeypatch.setattr("assay.ops.decode.generate.next_tokens", next_tokens)

    return install


def test_a_model_that_reads_finds_every_code(base, reading):
    reading()
    result = run(PROTOCOL, base)
    found = values(result)
    assert set(found.values()) == {1.0, 0.0} and found["needle_truncated_share", "all", "all"] == 0
    assert {part for metric, kind, part in found if kind == "needle"} == {
        f"{kind}/{length}/{depth}" for kind in ("single", "multiple", "hops") for length in (600, 800) for depth in (0, 100)
    }
    assert all(value == 1 for (metric, *_), value in found.items() if metric == "needle_accuracy")
    assert {row["metric"] for row in result.metrics} == set(METRICS["needle"])
    for row in result.metrics:
        assert row["n"] == (2 if row["slice_kind"] == "needle" else 24) and row["path"]
        Measurement(
            artifact_digest="a", base_digest="a", protocol_digest="p", suite="needle", run="r", measured_at=datetime.now(UTC), **row
        )  # fmt: skip
    assert [item["item"] for item in result.items] == list(range(24)) and all(item["value"] == 1 for item in result.items)
    assert imread(io.BytesIO(result.pictures["needle"])).ndim == 3 and len(result.pictures["needle"]) < LIMIT_BYTES


def test_a_model_that_follows_one_link_fails_the_chains_alone(base, reading):
    reading(deep=1)
    found = values(run(PROTOCOL, base))
    kinds = {
        kind: [value for (_, where, part), value in found.items() if where == "needle" and part.startswith(kind)] for kind in PROTOCOL.kinds
    }
    assert set(kinds["single"]) == set(kinds["multiple"]) == {1.0} and set(kinds["hops"]) == {0.0}
    assert found["needle_accuracy", "all", "all"] == pytest.approx(2 / 3)


def test_the_code_counts_and_not_the_words_around_it(base, reading):
    """Trap E10: the answer's number is matched, not a sentence."""
    reading(suffix=", I think")
    assert values(run(PROTOCOL, base))["needle_accuracy", "all", "all"] == 1


def test_a_code_that_may_go_on_at_the_limit_is_none_and_is_counted(base, reading):
    reading()
    found = values(run(PROTOCOL.model_copy(update={"max_new_tokens": 4, "kinds": ("single",)}), base))
    assert found["needle_accuracy", "all", "all"] == 0 and found["needle_truncated_share", "all", "all"] == 1


def test_lengths_are_kept_and_scores_do_not_depend_on_the_batch(base):
    """Traps E02, E05."""
    one, many = (run(PROTOCOL.model_copy(update={"batch": batch}), base) for batch in (1, 5))
    assert one.items == many.items and [each["said"] for each in one.notes["examples"]] == [each["said"] for each in many.notes["examples"]]
    for cell, tokens in one.notes["tokens"].items():
        assert int(cell.split("/")[1]) - 20 < tokens <= int(cell.split("/")[1])
    assert all(abs(depth - int(cell.split("/")[2])) < 1 for cell, depth in one.notes["depth_pct"].items())
    assert len({(each["cell"], each["answer"]) for each in one.notes["examples"]}) == 12


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lengths": (512, 2045)}, r"a prompt of length 2045 is 2,053 tokens long with its answer, and the model has positions for 2,048"),
        ({"lengths": (250,)}, "a prompt of 250 tokens has no room for a sentence"), ({"chat": True}, "no chat template"),
        ({"lengths": (1900,), "haystack": Text(path="short.txt")}, "the haystack has 6 tokens, fewer than the 7,600"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_run(base, monkeypatch, changed, told):
    (base / "short.txt").write_text("Rain.")
    monkeypatch.setattr(suite, "runner_of", None)
    with pytest.raises(ValueError, match=told):
        run(PROTOCOL.model_copy(update=changed), base)


def test_a_picture_of_many_fields_is_small_and_one_of_none_is_refused():
    shares = {(kind, 2**length, depth): (length * depth % 7) / 7 for kind in "abc" for length in range(8, 18) for depth in range(0, 101, 5)}
    assert len(needle_png(shares, title="many")) < LIMIT_BYTES
    assert len(needle_png({("single", 128, 0): 1.0})) > 1000
    with pytest.raises(ValueError, match="no share to draw"):
        needle_png({})


def test_colours_follow_the_share():
    dark, light = (imread(io.BytesIO(needle_png({("single", 128, 0): share}))) for share in (0.0, 1.0))
    assert dark.shape == light.shape
    middle = dark.shape[0] * 2 // 5, dark.shape[1] // 3
    assert dark[middle][:3].sum() < light[middle][:3].sum()
