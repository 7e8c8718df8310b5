"""The suite on a tiny checkpoint: its facts against counts of its own samples, one sample alone, their slices, and what it refuses."""

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest
import torch
from pydantic import ValidationError

from assay.ops.data.arithmetic import first_number, problems, prompt, stop_ids
from assay.ops.decode import samples as drawing
from assay.ops.evaluate.pass_at_k import pass_at_k
from assay.ops.measure import measure
from assay.ops.suites import subject as opening
from assay.ops.suites.arithmetic import Answers, facts_at, judge
from assay.ops.suites.subject import Subject
from assay.schemas.facts import Measurement
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Arithmetic
from assay.schemas.sampling import SamplingSpec

PROTOCOL = Arithmetic(
    problems=9, digits=(1,), operations=("subtract",), shots=2, samples=12, ks=(1, 3), temperatures=(0.0, 0.7, 2.0), max_new_tokens=4
)


@pytest.fixture
def base(make_llama, save_checkpoint_dir, tmp_path):
    """A head that says digits now and then, and line breaks."""
    for opened in (opening.model_of, opening.tokenizer_of, opening.runner_of):
        opened.cache_clear()
    model = make_llama(layers=2)
    directory = save_checkpoint_dir(model, tmp_path / "base")
    tokenizer = opening.tokenizer_of(directory)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.15)
        likely = [tokenizer.convert_tokens_to_ids(token) for token in [*"123456789-", "Ċ"]]
        model.lm_head.weight[likely] *= 3
    opening.tokenizer_of.cache_clear()
    return save_checkpoint_dir(model, tmp_path / "base")


def run(protocol, directory, *, kv=None):
    result = measure(protocol, Subject(directory, kv, None, directory), reference=None, experiment_dir=None)
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    return result


def values(result):
    return {(row["metric"], row["slice_kind"], row["slice"]): row["value"] for row in result.metrics}


def test_samples_of_one_problem_worked_by_hand():
    numbers = [Decimal(7), None, Decimal("7.0"), Decimal(-7), Decimal("7.5"), Decimal(-7), None, Decimal(7)]
    assert judge(numbers, 7, 3) == Answers(right=3, wrong=[2, 1], silent=2, cut=3)
    assert judge([None], 7, 0) == Answers(0, [], 1, 0) and judge(numbers, 7, 0).samples == 8


def test_facts_are_counts_of_the_samples_which_each_could_be_drawn_alone(base, monkeypatch):
    kept = []
    draw = drawing.draw_samples
    monkeypatch.setattr(drawing, "draw_samples", lambda *given, **more: (kept.append((given, more, draw(*given, **more))), kept[-1][2])[1])
    result = run(PROTOCOL, base)
    found = values(result)
    (runner, prompts, asked), more, said = kept[0]
    tokenizer = opening.tokenizer_of(base)
    drawn = problems(11, digits=(1,), operations=("subtract",), seed=0)
    assert [tokenizer.decode(ids) for ids in prompts] == [prompt(problem, drawn[:2]) for problem in drawn[2:]]
    assert [(sampling.temperature, count) for sampling, count in asked] == [(0, 1), (0.7, 12), (2, 12)]
    assert more["stop_ids"] == stop_ids(tokenizer) and more["vocabulary"] == len(tokenizer) < runner.shape.vocabulary
    alone = draw(runner, prompts[3:4], [asked[2]], **{**more, "generator_of": lambda _, sample: more["generator_of"](3, sample)})
    assert alone[0][0] == said[3][2]

    for way, temperature in enumerate(("0", "0.7", "2")):
        right, silent, cut, distinct = [], [], [], []
        for problem, of_problem in zip(drawn[2:], said, strict=True):
            samples = of_problem[way]
            ended = [sample[-1] in more["stop_ids"] for sample in samples]
            numbers = [
                first_number(tokenizer.decode(each, skip_special_tokens=True), cut=not end)
                for each, end in zip(samples, ended, strict=True)
            ]
            right.append(numbers.count(Decimal(problem.answer)))
            silent.append(numbers.count(None))
            cut.append(ended.count(False))
            distinct.append(len({number for number in numbers if number is not None}))
        whole = 9 * (12 if way else 1)
        assert found["pass_at_1", "temperature", temperature] == pytest.approx(sum(right) / whole)
        assert found["unparsed_share", "temperature", temperature] == pytest.approx(sum(silent) / whole)
        assert found["truncated_share", "temperature", temperature] == pytest.approx(sum(cut) / whole)
        assert found["distinct_answers", "temperature", temperature] == pytest.approx(sum(distinct) / 9)
        if way:
            assert 0 < sum(right) < whole
            any_of_three = sum(pass_at_k(12, count, 3) for count in right) / 9
            assert found["pass_at_k", "temperature_k", f"{temperature}/3"] == pytest.approx(any_of_three)
        shares = [item["value"] for item in result.items if item["metric"] == f"pass_at_1/{temperature}"]
        assert shares == pytest.approx([count * 9 / whole for count in right])
    assert 0 < found["unparsed_share", "temperature", "2"] < 1 and 0 < found["truncated_share", "temperature", "2"] < 1
    assert found["distinct_answers", "temperature", "0.7"] > 1


def test_each_number_stands_in_its_slice_and_the_first_temperature_speaks_without_one(base):
    result = run(PROTOCOL, base)
    assert {row["metric"] for row in result.metrics} == set(METRICS["arithmetic"])
    found = values(result)
    assert len(found) == len(result.metrics)
    assert {key for key in found if key[1] == "all"} == {("pass_at_1", "all", "all")}
    assert found["pass_at_1", "all", "all"] == found["pass_at_1", "temperature", "0"]
    for name in ("pass_at_k", "majority_at_k"):
        assert {part for metric, kind, part in found if metric == name} == {"0/1", "0.7/1", "0.7/3", "2/1", "2/3"}
    for temperature in ("0", "0.7", "2"):
        assert found["pass_at_k", "temperature_k", f"{temperature}/1"] == pytest.approx(found["pass_at_1", "temperature", temperature])
        assert found["majority_at_k", "temperature_k", f"{temperature}/1"] == pytest.approx(found["pass_at_1", "temperature", temperature])
    for row in result.metrics:
        assert row["n"] == 9 and row["standard_error"] is not None and row["path"]
        Measurement(
            artifact_digest="a", base_digest="a", protocol_digest="p", suite="arithmetic", run="r", measured_at=datetime.now(UTC), **row
        )  # fmt: skip
    assert len(result.items) == 27 and {item["item"] for item in result.items} == set(range(9))


def test_the_same_seed_gives_the_same_facts_and_another_one_others(base):
    assert run(PROTOCOL, base) == run(PROTOCOL, base)
    assert run(PROTOCOL.model_copy(update={"seed": 1}), base).metrics != run(PROTOCOL, base).metrics


def test_filters_and_keys_in_fewer_bits_are_measured_as_they_are_asked_for(base):
    plain = values(run(PROTOCOL, base))
    assert values(run(PROTOCOL, base, kv="int8")) != plain
    filtered = values(run(PROTOCOL.model_copy(update={"sampling": SamplingSpec(min_p=1.0)}), base))  # keeps the likeliest alone
    assert filtered["distinct_answers", "temperature", "2"] <= 1 < plain["distinct_answers", "temperature", "2"]
    assert filtered["pass_at_1", "temperature", "2"] == filtered["pass_at_1", "temperature", "0"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ks": (1, 9)}, "ks has 9, and a problem has samples = 8; draw 9 samples"), ({"ks": (2, 2)}, "2 is there twice"), ({"ks": (0,)}, "greater than or"),
        ({"temperatures": ()}, "empty list"), ({"temperatures": (-0.1,)}, "greater than or equal to 0"), ({"temperatures": (0.7, 0.70)}, "0.7 is there twice"),
        ({"sampling": {"temperature": 0.7}}, "the temperature 0.7; leave it out, and name it in temperatures"),
        ({"sampling": {"top_k": 1}}, "top_k = 1 is greedy"), ({"sampling": {"top_p": 0}}, "greater than 0"), ({"operations": ("divide",)}, "'add'"),
        ({"operations": ("add", "add")}, "add is there twice"), ({"digits": (0,)}, "greater than or equal to 1"), ({"problems": 1}, "greater than"),
        ({"problems": 160, "shots": 3, "digits": (1,), "operations": ("add", "multiply")}, "which makes 162 at most"), ({"samples": 0}, "greater than"),
    ],
)  # fmt: skip
def test_a_protocol_out_of_range_is_refused(wrong, told):
    with pytest.raises(ValidationError, match=told):
        Arithmetic(**wrong)


def test_as_many_problems_as_there_are_can_be_asked():
    fits = Arithmetic(problems=160, shots=2, digits=(1,), operations=("add", "multiply"))
    assert len(problems(fits.problems + fits.shots, digits=fits.digits, operations=fits.operations, seed=fits.seed)) == 162


def test_facts_of_one_temperature_worked_by_hand():
    rows = facts_at([Answers(2, [1], 1, 0), Answers(0, [4], 0, 1)], 0.7, (1, 2, 5), "path")  # of five, no problem has samples
    found = {(row["metric"], row["slice"]): (row["value"], row["standard_error"]) for row in rows}
    assert found == {
        ("pass_at_1", "0.7"): (0.25, pytest.approx(0.25)),  # the mean of 1/2 and 0, half of whose difference is its error
        ("unparsed_share", "0.7"): (0.125, pytest.approx(0.125)),
        ("truncated_share", "0.7"): (0.125, pytest.approx(0.125)),
        ("distinct_answers", "0.7"): (1.5, pytest.approx(0.5)),
        ("pass_at_k", "0.7/1"): (0.25, pytest.approx(0.25)),
        ("majority_at_k", "0.7/1"): (pytest.approx(0.25), pytest.approx(0.25)),
        ("pass_at_k", "0.7/2"): (pytest.approx(5 / 12), pytest.approx(5 / 12)),  # five of six pairs have a right one
        ("majority_at_k", "0.7/2"): (pytest.approx(1 / 3), pytest.approx(1 / 3)),  # three of six win, two are even
    }
