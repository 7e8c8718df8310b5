"""What an answer to each task is worth, and the questions themselves."""

import json
import re
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

import pytest
from reasoning_gym.utils import compute_decimal_reward

from assay.ops.tasks import generated, generated_documents
from assay.ops.tasks.generated import TASKS, Judged, form, number, number_of_line
from assay.ops.tasks.generated_documents import (
    AMOUNT,
    AT_ODDS,
    GRADES,
    _arithmetic,
    graded_arithmetic,
    graded_arithmetic_shots,
    instructions,
)
from assay.ops.tasks.generated_shots import WORD_PROBLEMS, word_problems
from assay.ops.tasks.graders.instructions import follows
from assay.ops.tasks.graders.numbers import final_number
from assay.ops.tasks.packaged import FOLDER, read, task_functions, tasks_digest
from assay.schemas.tasks import GenerationTask

GOLD = {"gold": "1000"}


def test_the_tasks_are_those_that_a_protocol_can_name():
    assert sorted(TASKS) == sorted(get_args(GenerationTask)) == list(TASKS)


def test_numbers_are_judged_exactly_and_vote_for_what_they_say():
    """Trap E07."""
    assert number(GOLD, "It is 1,000.00 of them") == Judged(1.0, False, vote=Decimal(1000))
    assert number(GOLD, "-1000.") == Judged(0.0, False, vote=Decimal(-1000))
    assert number(GOLD, "many") == Judged(0.0, True)
    assert number(GOLD, "That is 1000", cut=True) == Judged(0.0, True)
    assert number_of_line(GOLD, " 1000\n7") == Judged(1.0, False, vote=Decimal(1000)) == number_of_line(GOLD, " 1000\n7", cut=True)
    assert number_of_line(GOLD, " 1000", cut=True).silent


def test_forms_are_judged_strictly_and_loosely():
    row = {"rules": json.dumps([{"kind": "lower_case", "parameters": {}}, {"kind": "keyword", "parameters": {"word": "sea", "count": 1}}])}
    assert form(row, "by the sea") == Judged(1.0, False, 1.0)
    assert form(row, "Sure!\nby the sea") == Judged(1.0, False, 0.0)
    assert form(row, "by the lake") == Judged(0.0, False, 0.0) and form(row, " \n") == Judged(0.0, True, 0.0)


def test_what_the_harness_takes_are_the_same_scores():
    rules = {"rules": json.dumps([{"kind": "capitals", "parameters": {}}])}
    assert generated.number_results(GOLD, ["1,000 of them"]) == {"score": 1.0, "unparsed": 0.0}
    assert generated.number_of_line_results(GOLD, [" none"]) == {"score": 0.0, "unparsed": 1.0}
    assert generated.form_results(rules, ["WELL:\nno"]) == {"score": 1.0, "unparsed": 0.0, "strict": 0.0}


@pytest.mark.parametrize(
    ("answer", "amount"),
    [("9 apples", "9"), ("0.46 dollars", "0.46"), ("-3", "-3"), ("12", "12"), ("2 cups of flour", "2"), ("3:4", None), ("6th", None), ("3:30 p.m.", None),
     ("5/2", None), ("9; 11", None), ("Yes", None), ("6 inches; 12 inches", None), ("11:55 p.m. on 24 December", None)],
)  # fmt: skip
def test_only_answers_that_are_one_number_are_asked_for(answer, amount):
    found = AMOUNT.fullmatch(answer)
    assert (found[1] if found else None) == amount


def test_arithmetic_is_right_graded_and_no_shot_is_asked():
    every, shots, asked = _arithmetic(), graded_arithmetic_shots(), list(graded_arithmetic()["test"])
    assert len({row["question"] for row in every}) == len(every) == len(shots) + len(asked) == 84 * len(GRADES)
    assert [row["line"] for row in asked] == list(range(1, 80 * len(GRADES) + 1))
    for row in every:
        assert Decimal(row["gold"]) == eval(row["question"]), row  # terms and signs of our own making
        assert compute_decimal_reward(f" {row['gold']}", row["gold"]) == number_of_line(row, f" {row['gold']}").score == 1
        assert compute_decimal_reward(f"{row['gold']}1", row["gold"]) < 1 and number_of_line(row, f"{row['gold']}1").score == 0
    for grade, terms, digits in GRADES:
        of_grade = [row["question"] for row in every if row["grade"] == grade]
        numbers = [part for question in of_grade for part in question.split()[::2]]
        assert (
            len(of_grade) == 84
            and {len(question.split()[::2]) for question in of_grade} == {terms}
            and {len(part) for part in numbers} == {digits}
        )
        signs = {sign for question in of_grade for sign in question.split()[1::2]}
        assert signs == {"add": {"+"}, "subtract": {"-"}, "mixed": {"+", "-"}, "multiply": {"*"}}[grade.split("_")[0]]


def test_generated_questions_are_the_same_in_every_process(monkeypatch):
    before = graded_arithmetic()["test"][:30], instructions()["test"][:]
    generated_documents._arithmetic.cache_clear()
    assert (graded_arithmetic()["test"][:30], instructions()["test"][:]) == before


def test_instructions_are_distinct_verifiable_and_can_be_followed_together():
    rows = list(instructions()["test"])
    assert len({row["question"] for row in rows}) == len(rows) == 360
    for row in rows:
        rules = json.loads(row["rules"])
        kinds = frozenset(rule["kind"] for rule in rules)
        assert len(kinds) == len(rules) and kinds not in AT_ODDS and row["grade"] == (rules[0]["kind"] if len(rules) == 1 else "two")
        assert all(isinstance(follows("A text.", rule["kind"], rule["parameters"]), bool) for rule in rules)
        assert not form(row, "").score
    assert {row["grade"] for row in rows} >= {"json", "two", "lower_case"}


def test_our_solved_questions_are_right_and_read_as_their_answers():
    for each, row in zip(WORD_PROBLEMS, word_problems(), strict=True):
        sums = re.findall(r"([0-9]+ [-+*/] [0-9]+) = ([0-9]+)", each.steps)
        assert sums and each.steps.count("=") == len(sums) and all(eval(left) == int(right) for left, right in sums)
        assert final_number(row["steps"]) == Decimal(each.gold) == Decimal(sums[-1][1])


def packaged(name):
    """Rows of a task by the source that its file names."""
    source = read(FOLDER / f"{name}.yaml")["dataset_kwargs"]
    try:
        version(source["package"].partition("==")[0])
    except PackageNotFoundError:
        pytest.skip("requirements-data.txt is not installed")
    return source


def test_packaged_questions_keep_their_lines_and_all_that_judging_takes():
    rows = list(generated_documents.word_problems(**packaged("asdiv"))["test"])
    assert 2000 < len(rows) < 2305 and len({row["line"] for row in rows}) == len(rows) and max(row["line"] for row in rows) <= 2305
    assert rows[0] == {
        "line": 1, "question": "Seven red apples and two green apples are in the basket. How many apples are in the basket?", "gold": "9", "grade": "",
    }  # fmt: skip
    assert all(number(row, f"The answer is {row['gold']}.").score for row in rows)
    code = list(generated_documents.humaneval(**packaged("humaneval"))["test"])
    assert [row["line"] for row in code] == list(range(1, 165)) and all(f"def {row['entry_point']}(" in row["prompt"] for row in code)


def test_ifbench_asks_what_can_be_verified_and_says_how_much_it_leaves_out():
    source = packaged("ifbench")
    rows, share = list(generated_documents.ifbench(**source)["test"]), generated_documents.unverifiable_share(**source)
    assert len(rows) == round(294 * (1 - share)) and 0 <= share < 0.2
    for row in rows[::20]:
        judged = TASKS["ifbench"].judge(row, "A text.\nOf two lines.")
        assert judged.strict is not None and judged.strict <= judged.score and not judged.silent
        assert TASKS["ifbench"].judge(row, "").silent and generated.form_of_ifbench_results(row, [""])["score"] == 0


def test_what_decides_the_questions_is_in_the_digest_and_the_code():
    packaged("asdiv"), packaged("ifbench"), packaged("humaneval")
    assert len({tasks_digest([name]) for name in TASKS}) == len(TASKS)
    for name in TASKS:
        modules = {function.partition(":")[0] for function in task_functions([name])}
        assert {"assay.ops.tasks.generated", "assay.ops.tasks.generated_documents"} <= modules


def test_the_harness_alone_runs_our_files():
    """No code of ours but what the files name: a model of the harness that calculates has everything right, one that says nothing has nothing."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Calculator(LM):
        asked: list[tuple[str, list[str]]] = []

        def generate_until(self, requests):
            self.asked += [(request.args[0], request.args[1]["until"]) for request in requests]
            return [
                f" {eval(request.args[0].rpartition(chr(10))[2].removesuffix('='))}" if "Write" not in request.args[0] else ""
                for request in requests
            ]

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    found = simple_evaluate(
        model=Calculator(), tasks=["graded_arithmetic", "instructions"], task_manager=manager, limit=8, bootstrap_iters=0
    )
    assert found["results"]["graded_arithmetic"]["score,none"] == 1 and found["results"]["graded_arithmetic"]["unparsed,none"] == 0
    assert found["results"]["instructions"]["score,none"] == found["results"]["instructions"]["strict,none"] == 0
    prompts = [prompt for prompt, until in Calculator.asked if until == ["\n"]]
    assert len(prompts) == 8 and all(prompt.count("\n") == 4 and prompt.endswith(" =") for prompt in prompts)
