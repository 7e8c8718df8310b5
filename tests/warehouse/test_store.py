"""What is stored is found again, only under its own key, and only while it is whole."""

import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.schemas.manifest import Action, FileEntry, artifact_digest
from assay.schemas.spec import canonical_json, digest_of
from assay.warehouse.actions import difference
from assay.warehouse.errors import (
    ActionMismatchError,
    ArtifactMissingError,
    DamagedArtifact,
    EmptyArtifactError,
    RefusedFileError,
    StoreFullError,
)
from assay.warehouse.files import refusal
from assay.warehouse.store import Store

CODE, OTHER_CODE = "c" * 64, "d" * 64


def action(**changes) -> Action:
    fields = {
        "step": {"kind": "quantize", "format": "int4", "group_size": 64},
        "code": CODE,
        "parents": {"parent": "a" * 64},
        "versions": {"torch": "2.13.0"},
    }
    return Action(**{**fields, **changes})


def writer(files: dict[str, str], summary: dict | None = None, calls: list | None = None):
    """A build that writes ``files``, and counts itself in ``calls``."""

    def build(directory: Path) -> dict:
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        if calls is not None:
            calls.append(directory)
        return summary or {}

    return build


def nothing_is_left(store: Store) -> bool:
    return not any((store.root / "tmp").iterdir()) and not any((store.root / "locks").iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


# ---- hits


def test_a_second_ask_is_a_hit_and_builds_nothing(store):
    calls: list[Path] = []
    first = store.get_or_build(
        action(), writer({"config.json": "{}", "sub/model.safetensors": "x"}, {"layers": [3, 7]}, calls), kind="checkpoint"
    )
    again = Store(store.root).get_or_build(action(), writer({}, calls=calls), kind="checkpoint")
    assert (first.cached, again.cached, len(calls)) == (False, True, 1)
    assert again.digest == first.digest and again.summary == {"layers": [3, 7]} and again.seconds == first.seconds and again.reason is None
    assert sorted(path.name for path in first.path.rglob("*") if path.is_file()) == ["config.json", "manifest.json", "model.safetensors"]
    assert nothing_is_left(store)


def test_the_digest_is_worked_by_hand(store):
    sha_of_braces = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # sha256 of the two bytes {}
    built = store.get_or_build(action(), writer({"config.json": "{}"}), kind="checkpoint")
    assert built.digest == digest_of([["config.json", sha_of_braces]])
    assert store.manifest(built.digest).files == (FileEntry(path="config.json", size_bytes=2, sha256=sha_of_braces),)


def test_equal_bytes_under_another_key_are_one_artifact_with_each_its_own_summary(store):
    first = store.get_or_build(action(), writer({"a.json": "1"}, {"score": 1}), kind="checkpoint")
    second = store.get_or_build(action(code=OTHER_CODE), writer({"a.json": "1"}, {"score": 2}), kind="checkpoint")
    assert not second.cached and second.digest == first.digest and store.artifacts() == [first.digest]
    assert [store.lookup(each).summary["score"] for each in (action(), action(code=OTHER_CODE))] == [1, 2]
    assert store.manifest(first.digest).action == action()  # the one that first made it
    assert nothing_is_left(store)


def test_a_hit_loads_no_heavy_library(store):
    store.get_or_build(action(), writer({"a.json": "1"}), kind="checkpoint")
    code = (
        "import sys; from assay.warehouse.store import Store; from assay.warehouse import gc, fingerprint, versions;"
        "from assay.schemas.manifest import Action; store = Store(sys.argv[1]);"
        "built = store.get_or_build(Action.model_validate_json(sys.argv[2]), None, kind='checkpoint'); versions.numerics_versions();"
        "print(built.cached, built.path.is_dir(), sorted({'torch', 'transformers', 'dagster', 'duckdb', 'polars', 'fsspec'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(store.root), action().model_dump_json()], capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["True", "True", "[]"]


def test_a_hit_takes_milliseconds(store):
    store.get_or_build(action(), writer({f"{i}.json": "1" for i in range(8)}), kind="checkpoint")
    best = min(_timed(lambda: store.get_or_build(action(), writer({}), kind="checkpoint").path) for _ in range(20))
    assert best < 0.01  # 1 ms on an idle core


def _timed(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# ---- keys


@pytest.mark.parametrize(
    "change",
    [
        {"step": {"kind": "quantize", "format": "int4", "group_size": 32}},
        {"step": {"kind": "quantize", "format": "int4", "group_size": 64.0}},
        {"code": OTHER_CODE},
        {"parents": {"parent": "b" * 64}},
        {"parents": {"draft": "a" * 64}},
        {"parents": {"parent": "a" * 64, "draft": "b" * 64}},
        {"data": {"calibration": "e" * 64}},
        {"seed": 1},
        {"versions": {"torch": "2.14.0"}},
        {"versions": {"torch": "2.13.0", "transformers": "5.24.0"}},
    ],
    ids=str,
)
def test_every_field_of_an_action_is_in_its_key(change):
    """Two actions that differ anywhere must not share a cache entry: a known tool left data and code out and served wrong models."""
    assert action(**change).key != action().key
    assert set(Action.model_fields) == {"step", "code", "parents", "data", "seed", "versions"}  # a new field needs a row above


scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=4
)


@given(step=st.dictionaries(st.text(max_size=6), values, max_size=5), seed=st.randoms())
@settings(max_examples=30, deadline=None)
def test_a_key_does_not_depend_on_the_order_in_which_things_were_written(step, seed):
    items = list(step.items())
    seed.shuffle(items)
    assert action(step=dict(items)).key == action(step=step).key
    assert json.loads(canonical_json(step)) == step
    assert Action.model_validate_json(action(step=step).model_dump_json()).key == action(step=step).key


@given(
    st.lists(
        st.tuples(st.text("abc", min_size=1, max_size=4), st.text("0123456789abcdef", min_size=64, max_size=64)),
        unique_by=lambda row: row[0],
    ),
    st.randoms(),
)
@settings(max_examples=40, deadline=None)
def test_a_digest_does_not_depend_on_the_order_of_files_and_does_on_all_of_them(rows, random):
    files = [FileEntry(path=path, size_bytes=1, sha256=sha) for path, sha in rows]
    shuffled = random.sample(files, len(files))
    assert artifact_digest(tuple(shuffled)) == artifact_digest(tuple(files))
    if files:
        assert artifact_digest(tuple(files[1:])) != artifact_digest(tuple(files))
        assert artifact_digest((files[0].model_copy(update={"path": "other"}), *files[1:])) != artifact_digest(tuple(files))


def test_an_entry_that_holds_another_action_is_a_hard_error(store):
    """A cache that trusts the file name serves the wrong model."""
    store.get_or_build(action(), writer({"a.json": "1"}), kind="checkpoint")
    path = store.action_path(action().key)
    stored = json.loads(path.read_text())
    stored["action"]["step"]["group_size"] = 32
    path.write_text(json.dumps(stored))
    with pytest.raises(ActionMismatchError, match="holds another action"):
        store.get_or_build(action(), writer({"a.json": "1"}), kind="checkpoint")
    with pytest.raises(ActionMismatchError, match="holds another action"):
        store.lookup(action().key)


@pytest.mark.parametrize("bad", ["../" + "a" * 61, "a" * 63, "A" * 64, "", "a" * 64 + "/x"])
def test_a_digest_that_is_none_cannot_name_a_path(store, bad):
    with pytest.raises(ValueError, match="64 hexadecimal"):
        store.path(bad)
    with pytest.raises(ValueError, match="64 hexadecimal"):
        store.lookup(bad)


# ---- reasons


def test_a_miss_says_what_changed_since_the_nearest_earlier_action(store):
    build = writer({"a.json": "1"})
    first = store.get_or_build(action(), build, kind="checkpoint")
    assert first.reason == "there is no earlier quantize"
    store.get_or_build(action(step={"kind": "prune_depth", "layers": 4}), build, kind="checkpoint")  # another kind is not compared
    changed = action(step={"kind": "quantize", "format": "int4", "group_size": 32}, code=OTHER_CODE, parents={"parent": "b" * 64})
    expected = "unlike the nearest earlier quantize: step.group_size 64 → 32; code changed; parents.parent changed"
    assert store.explain(changed, kind="checkpoint") == expected
    assert store.get_or_build(changed, build, kind="checkpoint").reason == expected
    nearer = action(step={"kind": "quantize", "format": "int4", "group_size": 32}, code=OTHER_CODE, parents={"parent": "b" * 64}, seed=3)
    assert store.get_or_build(nearer, build, kind="checkpoint").reason == "unlike the nearest earlier quantize: seed 0 → 3"


def test_differences_name_what_was_added_and_removed():
    before = action(step={"kind": "kv", "format": "fp8", "window": None})
    after = action(step={"kind": "kv", "format": "fp8", "skip": [0, 1]}, parents={}, data={"text": "e" * 64}, versions={"torch": "2.14.0"})
    assert difference(before, after) == [
        "step.window removed: null",
        "parents.parent removed",
        "versions.torch 2.13.0 → 2.14.0",
        "step.skip.0 added: 0",
        "step.skip.1 added: 1",
        "data.text added",
    ]
    assert difference(before, before) == []
    assert difference(action(step={"n": 1}), action(step={"n": True})) == ["step.n 1 → true"]


def test_an_action_without_a_step_kind_is_compared_with_artifacts_of_its_kind(store):
    store.get_or_build(action(step={"hub": "org/name"}), writer({"a.json": "1"}), kind="base")
    assert store.explain(action(step={"hub": "org/other"}), kind="base") == "unlike the nearest earlier base: step.hub org/name → org/other"


def test_a_reason_is_found_fast_among_thousands_of_actions(store):
    built = store.get_or_build(action(), writer({"a.json": "1"}), kind="checkpoint")
    entry = store.lookup(action())
    for seed in range(1, 1500):
        each = action(seed=seed)
        copy = entry.model_copy(update={"key": each.key, "action": each})
        store.action_path(each.key).write_text(copy.model_dump_json())
        (store.kind_path("quantize") / each.key).touch()
    assert _timed(lambda: store.explain(action(seed=5000), kind="checkpoint")) < 0.25
    assert len(store.seconds_of("quantize")) == 64 and store.seconds_of("quantize")[0] == built.seconds
    assert store.seconds_of("distill") == []


# ---- failures


def test_a_build_that_raises_leaves_nothing_and_is_tried_again(store):
    def fails(directory: Path) -> dict:
        (directory / "half.json").write_text("{")
        raise ArithmeticError("no")

    for _ in range(2):  # a failed step is never cached
        with pytest.raises(ArithmeticError):
            store.get_or_build(action(), fails, kind="checkpoint")
        assert store.artifacts() == [] and list(store.actions()) == [] and nothing_is_left(store)
    assert not store.get_or_build(action(), writer({"a.json": "1"}), kind="checkpoint").cached


def test_a_build_without_files_is_an_error(store):
    with pytest.raises(EmptyArtifactError, match="wrote no file"):
        store.get_or_build(action(), writer({}), kind="checkpoint")
    assert list(store.actions()) == [] and nothing_is_left(store)


@pytest.mark.parametrize("summary", [{"kl": float("nan")}, {"kl": float("inf")}, {"tensor": object()}], ids=["nan", "inf", "object"])
def test_a_summary_that_is_not_json_of_finite_numbers_is_refused(store, summary):
    with pytest.raises(TypeError, match="not JSON of finite numbers"):
        store.get_or_build(action(), writer({"a.json": "1"}, summary), kind="checkpoint")
    assert store.artifacts() == []


def test_a_build_that_forgets_its_summary_is_told_so(store):
    with pytest.raises(TypeError, match="returned None; expected its summary"):
        store.get_or_build(action(), lambda directory: (directory / "a.json").touch(), kind="checkpoint")
    assert store.artifacts() == []


@pytest.mark.parametrize(
    "name", ["model.bin", "model.pt", "x.pth", "a.PKL", "a.pickle", "a.ckpt", "code.py", "lib.so", "noname", "manifest.json/x.bin"]
)
def test_files_that_could_run_code_are_refused(store, name):
    with pytest.raises(RefusedFileError, match=r"may not hold"):
        store.get_or_build(action(), writer({"ok.json": "1", name: "x"}), kind="checkpoint")
    assert store.artifacts() == [] and nothing_is_left(store)


@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00002.safetensors",
        "config.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "plot.png",
        "LICENSE",
        "a/b.json",
    ],
)
def test_files_of_a_checkpoint_are_allowed(name):
    assert refusal(name) is None


@pytest.mark.parametrize(
    "path", ["/etc/a.json", "../a.json", "a/../../b.json", "a//b.json", "./a.json", "a\\b.json", "", ".", "a\0.json", "manifest.json"]
)
def test_paths_that_leave_an_artifact_are_refused(path):
    assert refusal(path) is not None


@pytest.mark.parametrize("to_folder", [False, True])
def test_a_symlink_is_refused(store, tmp_path, to_folder):
    (tmp_path / "secret.json").write_text("1")

    def build(directory: Path) -> dict:
        (directory / "link.json").symlink_to(tmp_path if to_folder else tmp_path / "secret.json")
        return {}

    with pytest.raises(RefusedFileError, match="symlink"):
        store.get_or_build(action(), build, kind="checkpoint")
    assert (tmp_path / "secret.json").read_text() == "1"


@pytest.mark.parametrize("wrapped", [False, True], ids=["OSError", "text of another library"])
def test_a_full_disk_is_said_clearly_and_leaves_nothing_half(store, wrapped):
    def build(directory: Path) -> dict:
        (directory / "a.json").write_text("1")
        try:
            with Path("/dev/full").open("wb", buffering=0) as full:
                full.write(b"x")
        except OSError as error:
            if wrapped:
                raise RuntimeError("I/O error: No space left on device (os error 28)") from None
            raise error
        return {}

    with pytest.raises(StoreFullError, match=r"no space left for the store .* bytes free.*assay gc"):
        store.get_or_build(action(), build, kind="checkpoint")
    assert store.artifacts() == [] and list(store.actions()) == [] and nothing_is_left(store)


def test_a_disk_that_fills_while_publishing_leaves_nothing_half(store, monkeypatch):
    real = os.fsync
    calls = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == fail_at:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    fail_at = 0
    store.get_or_build(action(), writer({"a.json": "1"}), kind="checkpoint")
    total = len(calls)
    assert total >= 5  # the file, the manifest, the directory, artifacts/, the entry, actions/
    for fail_at in range(1, total):  # the last one comes after the entry is there
        calls.clear()
        with pytest.raises(StoreFullError):
            store.get_or_build(action(seed=fail_at), writer({"a.json": str(fail_at)}), kind="checkpoint")
        assert store.lookup(action(seed=fail_at)) is None and nothing_is_left(store)
        assert list(store.verify()) == []
        assert not list(store.root.rglob("*.part"))


# ---- damage


def build_one(store: Store):
    return store.get_or_build(action(), writer({"model.safetensors": "0123456789", "config.json": "{}"}), kind="checkpoint")


def cut_short(directory: Path) -> None:
    (directory / "model.safetensors").chmod(0o644)
    (directory / "model.safetensors").write_text("012345")


def remove(directory: Path) -> None:
    (directory / "config.json").unlink()


def break_manifest(directory: Path) -> None:
    (directory / "manifest.json").chmod(0o644)
    (directory / "manifest.json").write_text("{")


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def swap_for_link(directory: Path) -> None:
    (directory / "config.json").rename(directory.parent / "elsewhere.json")
    (directory / "config.json").symlink_to(directory.parent / "elsewhere.json")


def change_manifest(directory: Path) -> None:
    (directory / "manifest.json").chmod(0o644)
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text.replace('"config.json"', '"../config.json"'))


def forge_manifest(directory: Path) -> None:
    """Other contents of the same size, and a manifest that agrees with them."""
    for name, old, new in (("config.json", "{}", "[]"), ("manifest.json", sha_of("{}"), sha_of("[]"))):
        (directory / name).chmod(0o644)
        (directory / name).write_text((directory / name).read_text().replace(old, new))


def sha_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


DAMAGES = [cut_short, remove, break_manifest, remove_manifest, swap_for_link, change_manifest, forge_manifest]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_artifact_is_set_aside_with_a_warning_and_made_again(store, damage):
    built = build_one(store)
    damage(built.path)
    with pytest.warns(DamagedArtifact, match="set aside"):
        again = build_one(store)
    assert not again.cached and again.digest == built.digest and again.reason is not None and "damaged" in again.reason
    aside = list((store.root / "quarantine").iterdir())
    assert len(aside) == 1 and (aside[0] / "why.txt").read_text().strip()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_one(store).cached and list(store.verify()) == []


def test_the_sound_artifact_that_has_replaced_a_damaged_one_is_not_set_aside(store):
    """Of two processes that see one fault, the slower must not take away what the faster has made again."""
    built = build_one(store)
    seen_by_the_slower = built.path.stat().st_ino
    remove(built.path)
    with pytest.warns(DamagedArtifact):
        again = build_one(store)
    assert store.set_aside(built.digest, [("config.json", "is missing")], seen_by_the_slower) is None
    assert again.path.is_dir() and len(list((store.root / "quarantine").iterdir())) == 1


def test_a_lost_artifact_is_made_again(store):
    built = build_one(store)
    built.path.rename(store.root.parent / "taken")
    again = build_one(store)
    assert not again.cached and again.reason is not None and "is not in the store" in again.reason
    with pytest.raises(ArtifactMissingError, match="is not in the store"):
        store.path("f" * 64)


def test_an_entry_that_does_not_read_is_set_aside_and_made_again(store):
    built = build_one(store)
    for text in (b"", b"{", b"\xff\xfe", b"[]", b'{"key": 1}'):
        store.action_path(action().key).write_bytes(text)
        assert list(store.actions()) == []
        with pytest.warns(DamagedArtifact, match="does not read"):
            again = build_one(store)
        assert (again.cached, again.digest) == (False, built.digest)


def test_verify_finds_changed_bytes_of_the_same_size_and_files_that_are_not_listed(store):
    built = build_one(store)
    assert list(store.verify()) == []
    (built.path / "model.safetensors").chmod(0o644)
    (built.path / "model.safetensors").write_text("0123456780")
    (built.path / "pytorch_model.bin").write_text("x")
    assert build_one(store).cached  # sizes alone cannot tell
    problems = list(store.verify(["e" * 64, built.digest]))
    assert [(each.file, each.quarantined) for each in problems] == [("", None), ("model.safetensors", None), ("pytorch_model.bin", None)]
    assert "sha256" in problems[1].fault and "not listed" in str(problems[2])
    assert all(each.quarantined is not None for each in store.verify(quarantine=True))
    assert store.artifacts() == [] and not build_one(store).cached


def test_a_step_that_makes_other_bytes_when_made_again_is_said_to_be_random(store):
    built = build_one(store)
    built.path.rename(store.root.parent / "taken")
    with pytest.warns(UserWarning, match="not deterministic"):
        again = store.get_or_build(action(), writer({"a.json": "other"}), kind="checkpoint")
    assert again.digest != built.digest and store.lookup(action()).digest == again.digest


def test_files_of_an_artifact_are_read_only(store):
    built = build_one(store)
    assert {path.stat().st_mode & 0o222 for path in built.path.iterdir()} == {0}


# ---- the rest


def test_size_counts_files_and_manifests(store):
    assert store.size() == 0
    built = build_one(store)
    assert store.size() == 12 + (built.path / "manifest.json").stat().st_size
    assert store.manifest(built.digest).size_bytes == 12


def test_entries_say_when_and_how_long(store):
    before = datetime.now(UTC)
    store.get_or_build(action(), lambda directory: (time.sleep(0.05), (directory / "a.json").write_text("1"), {})[-1], kind="checkpoint")
    (entry,) = store.actions()
    assert before <= entry.built_at <= datetime.now(UTC) and 0.05 <= entry.seconds < 5 and entry.kind == "checkpoint"


def test_a_plain_file_url_is_a_directory(tmp_path):
    store = Store(f"file://{tmp_path}/there")
    assert store.remote is None and store.root == tmp_path / "there"


def test_a_file_that_fsync_did_not_see_is_not_renamed(store, monkeypatch):
    """Order on disk: every file and directory is synced before the rename makes it an artifact, and that before the entry."""
    events: list[str] = []
    real_fsync, real_rename, real_replace = os.fsync, Path.rename, Path.replace

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(f"sync {path.name}")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda self, target: (events.append("rename"), real_rename(self, target))[-1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append("entry"), real_replace(self, target))[-1])
    store.get_or_build(action(), writer({"a.json": "1", "sub/b.json": "2"}), kind="checkpoint")
    rename, entry = events.index("rename"), events.index("entry")
    assert {"sync a.json", "sync b.json", "sync manifest.json", "sync sub", "sync artifact"} <= set(events[:rename])
    assert "sync artifacts" in events[rename:entry] and any(each.endswith(".part") for each in events[rename:entry])
    assert events[entry + 1] == "sync actions"
