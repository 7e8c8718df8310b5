"""The suite on a tiny checkpoint, over our own packaged questions: its numbers against the harness's own model, by hand, and what variants share."""

import json
from math import exp, log, sqrt

import pytest

from assay.ops.measure import measure
from assay.ops.suites import subject as opening
from assay.ops.suites.choice import PLACES, Answer, answer, facts
from assay.ops.suites.subject import PER_TASK, Subject
from assay.ops.suites.tasks import evaluate, longest
from assay.ops.tasks.packaged import packaged_tasks
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Choice

PROTOCOL = Choice(tasks=("openbook_qa", "commonsense_qa"), questions=6, batch=4)


@pytest.fixture(scope="module")
def base(make_llama, save_checkpoint_dir, tmp_path_factory):
    for opened in (opening.model_of, opening.tokenizer_of, opening.runner_of):
        opened.cache_clear()
    return save_checkpoint_dir(make_llama(vocab=101, layers=2), tmp_path_factory.mktemp("choice") / "base")


def run(protocol, directory, *, kv=None):
    result = measure(protocol, Subject(directory, kv, None, directory), reference=None, experiment_dir=None)
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    return result


def values(result):
    return {(row["metric"], row["slice"]): (row["value"], row["standard_error"], row["n"]) for row in result.metrics}


@pytest.fixture(scope="module")
def result(base):
    return run(PROTOCOL, base)


def test_an_answer_worked_by_hand():
    sample = {
        "filtered_resps": [(log(0.2), False), (log(0.5), True), (log(0.1), False)],
        "target": 0,
        "doc": {"line": 7},
        "acc": 0.0,
        "acc_bytes": 1.0,
    }
    assert answer(sample) == pytest.approx(Answer(7, 0, 1, 0.8, log(0.2) - log(0.5)))
    assert answer({**sample, "target": 1}).margin_nats == pytest.approx(log(0.5 / 0.2))


def test_all_tasks_count_the_same_and_their_errors_are_independent():
    found = {"a": [Answer(1, 1, 0, 0, 0), Answer(2, 0, 0, 0, 0)], "b": [Answer(n, 1, 0, 0, 0) for n in range(3)] + [Answer(9, 0, 0, 0, 0)]}
    whole, one, other = facts("accuracy", found, "p")
    assert (one["value"], other["value"], whole["value"], whole["n"]) == (0.5, 0.75, 0.625, 6)
    assert one["standard_error"] == pytest.approx(0.5)  # sqrt(p(1-p)/(n-1)): sqrt(0.25 / 1)
    assert other["standard_error"] == pytest.approx(0.25)  # sqrt(0.1875 / 3)
    assert whole["standard_error"] == pytest.approx(sqrt(0.5**2 + 0.25**2) / 2)
    assert (whole["slice_kind"], one["slice_kind"], one["slice"]) == ("all", "task", "a")


def test_scores_are_those_of_the_harness_with_its_own_model(base, result):
    from lm_eval.models.huggingface import HFLM

    tasks = packaged_tasks(PROTOCOL.tasks, questions=6, seed=0)
    theirs = evaluate(HFLM(pretrained=str(base), dtype="float32", device="cpu", batch_size=4), tasks, chat=False)  # type: ignore[arg-type]
    found = values(result)
    for name, scores in theirs["results"].items():
        assert found["accuracy", name][:2] == pytest.approx((scores["acc,none"], scores["acc_stderr,none"]))
        assert found["accuracy_normalised", name][:2] == pytest.approx((scores["acc_bytes,none"], scores["acc_bytes_stderr,none"]))
        masses = [sum(exp(value) for value, _ in sample["filtered_resps"]) for sample in theirs["samples"][name]]
        assert found["option_mass", name][0] == pytest.approx(sum(masses) / 6, rel=1e-3)
    assert {row["metric"] for row in result.metrics} == set(METRICS["choice"])


def test_items_say_the_line_of_the_file_and_their_means_are_the_facts(base, result):
    lines = {name: set(task.eval_docs["line"]) for name, task in packaged_tasks(PROTOCOL.tasks, questions=6, seed=0).items()}
    for name in PROTOCOL.tasks:
        for kind in ("accuracy", "accuracy_normalised"):
            mine = {item["item"]: item["value"] for item in result.items if item["metric"] == f"{kind}/{name}"}
            assert {number - PLACES.index(name) * PER_TASK for number in mine} == lines[name]
            assert sum(mine.values()) / 6 == values(result)[kind, name][0]
        margins = {item["item"]: item["value"] for item in result.items if item["metric"] == f"margin_nats/{name}"}
        right = {item["item"]: item["value"] for item in result.items if item["metric"] == f"accuracy/{name}"}
        assert all((margin > 0) == bool(right[number]) for number, margin in margins.items())
    assert PLACES == ["boolq", "commonsense_qa", "hellaswag", "mmlu", "openbook_qa", "piqa"]


def test_variants_are_asked_the_same_and_another_order_asks_others(base, result):
    def numbers(found):
        return [(item["item"], item["metric"]) for item in found.items]

    assert numbers(run(PROTOCOL, base, kv="int8")) == numbers(result)
    assert set(numbers(run(PROTOCOL.model_copy(update={"order": 1}), base))) != set(numbers(result))


def test_the_batch_changes_no_score(result, base):
    other = run(PROTOCOL.model_copy(update={"batch": 1}), base)
    assert [item["value"] for item in other.items] == pytest.approx([item["value"] for item in result.items], abs=1e-4)


def test_solved_questions_come_before_each_and_the_notes_show_the_prompts(base, result):
    shown = run(PROTOCOL.model_copy(update={"tasks": ("commonsense_qa",), "shots": 2, "questions": 3}), base).notes["examples"]
    plain = [each for each in result.notes["examples"] if each["task"] == "commonsense_qa"]
    assert [each["prompt"].split("\n\n")[-1] for each in shown] == [each["prompt"] for each in plain[:3]]
    assert len({each["prompt"].rsplit("\n\n", 1)[0] for each in shown}) == 1 and shown[0]["prompt"].count("Answer:") == 3
    assert result.notes["truncated"] == 0 and len(result.notes["first_ids"]) == 8
    assert all(each["right"] in each["options"] and each["chosen"] in each["options"] for each in shown)


def test_a_model_s_length_is_its_config_s(tmp_path):
    for config, expected in (({"max_position_embeddings": 77}, 77), ({"text_config": {"n_ctx": 5}}, 5), ({}, 2048)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert longest(tmp_path) == expected
