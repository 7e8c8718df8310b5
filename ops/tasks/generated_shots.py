"""Solved questions that stand before those that are asked, in our own words. Not here: solved questions that are generated with theirs."""

from typing import NamedTuple


class Solved(NamedTuple):
    """A word problem, the steps that solve it, and its number."""

    question: str
    steps: str
    gold: str


WORD_PROBLEMS: tuple[Solved, ...] = (
    Solved("A shelf holds 8 cups. Lena puts 5 more cups on it. How many cups are on the shelf?", "There were 8 cups. 8 + 5 = 13.", "13"),
    Solved(
        "A baker makes 6 trays of rolls with 12 rolls on each tray. How many rolls does he make?",
        "There are 6 trays of 12 rolls. 6 * 12 = 72.", "72",
    ),
    Solved("Of 40 chairs in a hall, 17 are taken. How many chairs are free?", "17 of the 40 chairs are taken. 40 - 17 = 23.", "23"),
    Solved("A rope of 36 metres is cut into 4 equal parts. How long is each part?", "36 metres are shared by 4 parts. 36 / 4 = 9.", "9"),
    Solved(
        "Tom has 15 stamps. He gives 3 of them to each of his 2 sisters. How many stamps does he keep?",
        "He gives away 3 * 2 = 6 stamps. 15 - 6 = 9.", "9",
    ),
    Solved(
        "A pen costs 2 dollars and a notebook costs 5 dollars. What do 3 pens and 2 notebooks cost together?",
        "The pens cost 3 * 2 = 6 dollars and the notebooks 2 * 5 = 10 dollars. 6 + 10 = 16.", "16",
    ),
    Solved(
        "A bus starts with 21 people. At one stop 8 get off and 14 get on. How many people are on the bus now?",
        "After 8 got off there were 21 - 8 = 13 people. 13 + 14 = 27.", "27",
    ),
    Solved(
        "Mia reads 18 pages a day. How many pages does she read in a week?", "A week has 7 days. 18 * 7 = 126.", "126",
    ),
)  # fmt: skip


def word_problems() -> list[dict[str, str]]:
    """As rows of the harness; ``steps`` end with the answer in words, as it is read."""
    return [{"question": each.question, "gold": each.gold, "steps": f"{each.steps} The answer is {each.gold}."} for each in WORD_PROBLEMS]
