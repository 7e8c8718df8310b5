"""What of tasks makes a measurement a new one: their files, data and code, a user's own files, the text around needles. Not here: digests themselves."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from assay.assets import ledger
from assay.assets.ledger import Ledger
from assay.ops.tasks import packaged
from assay.schemas.protocols import Choice, Divergence, Generation, LmEval, Needle


def tasks(protocol, file: Path = Path("x/experiment.yaml")) -> dict[str, str]:
    return Ledger.tasks(SimpleNamespace(experiment=SimpleNamespace(file=file)), protocol)  # type: ignore[arg-type]


def test_a_changed_task_file_measures_its_own_protocols_anew(monkeypatch, tmp_path):
    protocols = [Choice(tasks=("piqa",)), Choice(tasks=("boolq",)), Generation(tasks=("asdiv",))]
    before = [tasks(protocol) for protocol in protocols]
    for file in packaged.FOLDER.glob("*.yaml"):
        (tmp_path / file.name).write_bytes(file.read_bytes() + (b"# changed\n" if file.stem == "piqa" else b""))
    monkeypatch.setattr(packaged, "FOLDER", tmp_path)
    after = [tasks(protocol) for protocol in protocols]
    assert [one["tasks"] == other["tasks"] for one, other in zip(before, after, strict=True)] == [False, True, True]
    assert [one["task_code"] for one in before] == [other["task_code"] for other in after]


def test_changed_code_that_only_a_task_file_names_is_seen(monkeypatch):
    before = tasks(Choice(tasks=("piqa",)))
    real = ledger.fingerprint
    monkeypatch.setattr(ledger, "fingerprint", lambda entry: real(entry) + ("changed" if entry.endswith(":lettered") else ""))
    ledger.code.cache_clear()
    try:
        assert tasks(Choice(tasks=("piqa",)))["task_code"] != before["task_code"]
    finally:
        ledger.code.cache_clear()


def test_files_of_a_user_count_and_lie_beside_the_experiment(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.yaml").write_text("task: a\n")
    protocol = LmEval(tasks=("a",), include="own")
    before = tasks(protocol, tmp_path / "experiment.yaml")
    (tmp_path / "own" / "a.yaml").write_text("task: a\ndescription: other\n")
    assert tasks(protocol, tmp_path / "experiment.yaml") != before
    with pytest.raises(ValueError, match="is no directory"):
        tasks(protocol, tmp_path / "elsewhere" / "experiment.yaml")


def test_protocols_without_tasks_have_nothing_of_them():
    assert tasks(Divergence()) == tasks(Needle()) == {}
