"""Whether a function that a model has written passes the tests of its problem. Not here: how a program is kept from doing harm (``ops/tasks/sandbox.py``)."""

import ast
import re
from collections.abc import Mapping

from assay.ops.tasks.sandbox import LIMITS, Limits, Ran, run_program

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def solution(problem: Mapping[str, str], text: str) -> str:
    """The function as a whole: the problem's beginning and ``text`` after it; or, where ``text`` has it in full or in a fence, what is said there.

    Args:
        problem: ``prompt``, the beginning of a function, and ``entry_point``, its name.
    """
    fenced = FENCE.search(text)
    said = fenced[1] if fenced else text
    head = f"def {problem['entry_point']}("
    if any(line.startswith(head) for line in said.splitlines()):
        return f"{problem['prompt'].partition(head)[0]}\n{said}"  # after the imports and helpers of the prompt
    return problem["prompt"] + said


def parses(source: str) -> bool:
    """Whether ``source`` is Python at all."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def passes(problem: Mapping[str, str], text: str, limits: Limits = LIMITS) -> Ran:
    """Run the function of :func:`solution` against ``problem["test"]``, as HumanEval does.

    Raises:
        PermissionError: generated code may not run here.
    Source:
        Chen et al. 2021, arXiv:2107.03374.
    """
    return run_program(f"{solution(problem, text)}\n{problem['test']}\ncheck({problem['entry_point']})\n", limits)
