"""Questions with short answers and the form that an answer takes: the built-in prompts of the suite ``constrained``. Not here: asking them."""

from typing import NamedTuple


class Question(NamedTuple):
    """A prompt, the language of its answers (``regex`` or ``json_schema``, JSON text), and what a right one says."""

    prompt: str
    regex: str | None = None
    json_schema: str | None = None
    expected: str | None = None


YES_NO, LETTER, DIGIT = "Yes|No", "[A-D]", "[0-9]"
CITY = (
    '{"type": "object", "properties": {"city": {"enum": ["Paris", "Rome", "Berlin", "Madrid"]}, "european": {"type": "boolean"}}, '
    '"required": ["city", "european"], "additionalProperties": false}'
)

QUESTIONS: tuple[Question, ...] = (
    Question("Is the sun a star? Answer Yes or No.", YES_NO, expected="Yes"),
    Question("Can a fish climb a ladder? Answer Yes or No.", YES_NO, expected="No"),
    Question("Is ten larger than seven? Answer Yes or No.", YES_NO, expected="Yes"),
    Question("Do stones grow on trees? Answer Yes or No.", YES_NO, expected="No"),
    Question("Which animal barks?\nA. a cat\nB. a cow\nC. a dog\nD. a hen\nAnswer with the letter.", LETTER, expected="C"),
    Question("Which of these is a fruit?\nA. a brick\nB. an apple\nC. a spoon\nD. a shoe\nAnswer with the letter.", LETTER, expected="B"),
    Question("Which month comes first?\nA. May\nB. June\nC. March\nD. January\nAnswer with the letter.", LETTER, expected="D"),
    Question("Which of these is frozen?\nA. steam\nB. ice\nC. rain\nD. fog\nAnswer with the letter.", LETTER, expected="B"),
    Question("What is 2 + 3? Answer with one digit.", DIGIT, expected="5"),
    Question("How many legs has a spider? Answer with one digit.", DIGIT, expected="8"),
    Question("How many days has a week? Answer with a number.", "[1-9][0-9]?", expected="7"),
    Question("Write the first day of the year 2000 as YYYY-MM-DD.", r"\d{4}-(0[1-9]|1[0-2])-([0-2]\d|3[01])", expected="2000-01-01"),
    Question("Name the capital of France, and say whether it is in Europe, as JSON.", json_schema=CITY, expected="Paris"),
    Question("Name the capital of Italy, and say whether it is in Europe, as JSON.", json_schema=CITY, expected="Rome"),
)
