"""A store on a URL: what one machine made, another finds; what is half uploaded, nobody sees."""

import json
import sys
import warnings
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from assay.schemas.manifest import Action
from assay.warehouse.errors import ArtifactMissingError, DamagedArtifact, RemoteError
from assay.warehouse.gc import collect, plan_gc
from assay.warehouse.remote import Remote
from assay.warehouse.store import Store

ACTION = Action(step={"kind": "quantize"}, code="c" * 64)


def build(directory: Path) -> dict:
    (directory / "sub").mkdir()
    (directory / "sub" / "model.safetensors").write_text("0123456789")
    (directory / "config.json").write_text("{}")
    return {"layers": [1]}


def must_not_build(directory: Path) -> dict:
    raise AssertionError("it is in the store")


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path) -> str:
    return f"memory://{uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/remote"


def files_at(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root).lstrip("/") for path in fs.find(root))


def at(url: str, path: str) -> tuple:
    fs, root = fsspec.core.url_to_fs(url)
    return fs, f"{root}/{path}"


def test_another_machine_finds_what_one_has_made_and_downloads_it_only_when_it_is_opened(url, tmp_path):
    made = Store(url, cache=tmp_path / "one").get_or_build(ACTION, build, kind="checkpoint")
    other = Store(url, cache=tmp_path / "two")
    found = other.get_or_build(ACTION, must_not_build, kind="checkpoint")
    assert found.cached and found.digest == made.digest and found.summary == {"layers": [1]}
    assert other.artifacts() == [] and other.manifest(made.digest).size_bytes == 12  # nothing was downloaded
    assert (found.path / "sub" / "model.safetensors").read_text() == "0123456789"
    assert other.artifacts() == [made.digest] and list(other.verify()) == []
    assert not any((other.root / "tmp").iterdir())


def test_the_layout_is_the_local_one(url, tmp_path):
    made = Store(url, cache=tmp_path / "one").get_or_build(ACTION, build, kind="checkpoint")
    folder = f"artifacts/{made.digest}"
    assert files_at(url) == sorted(
        [f"actions/{ACTION.key}.json", f"{folder}/config.json", f"{folder}/manifest.json", f"{folder}/sub/model.safetensors"]
    )
    if url.startswith("file"):  # so a store on a shared directory can be opened as one, too
        assert Store(url).get_or_build(ACTION, must_not_build, kind="checkpoint").cached


def test_what_is_in_the_cache_needs_no_network(url, tmp_path, monkeypatch):
    store = Store(url, cache=tmp_path / "one")
    store.get_or_build(ACTION, build, kind="checkpoint")
    monkeypatch.setattr(Remote, "_read", lambda *_: pytest.fail("asked the network"))
    assert Store(url, cache=tmp_path / "one").get_or_build(ACTION, must_not_build, kind="checkpoint").path.is_dir()


def record(monkeypatch, store: Store, fail_at: int | None = None) -> list[str]:
    """Write down what is uploaded, in order; fail before upload number ``fail_at``."""
    order: list[str] = []
    fs = store.remote._fs

    def tell(path: str) -> None:
        if len(order) == fail_at:
            raise ConnectionResetError("the line is dead")
        order.append(path.split("/", 3)[-1] if "artifacts" in path else path.rpartition("/")[2])

    put, pipe = type(fs).put_file, type(fs).pipe_file
    monkeypatch.setattr(type(fs), "put_file", lambda self, source, target, **more: (tell(target), put(self, source, target, **more))[-1])
    monkeypatch.setattr(type(fs), "pipe_file", lambda self, target, data, **more: (tell(target), pipe(self, target, data, **more))[-1])
    return order


def test_files_are_uploaded_first_then_the_manifest_and_the_entry_last(tmp_path, monkeypatch):
    store = Store(f"memory://{uuid4().hex}", cache=tmp_path / "one")
    order = record(monkeypatch, store)
    built = store.get_or_build(ACTION, build, kind="checkpoint")
    names = [path.rpartition("/")[2] for path in order]
    assert sorted(names[:2]) == ["config.json", "model.safetensors"]
    assert names[2:] == ["manifest.json", f"{ACTION.key}.json"] and built.digest in store.artifacts()


@pytest.mark.parametrize("fail_at", [0, 1, 2, 3])
def test_an_upload_that_breaks_off_is_invisible_and_is_finished_by_the_next_ask(tmp_path, fail_at):
    url = f"memory://{uuid4().hex}"
    store = Store(url, cache=tmp_path / "one")
    with pytest.MonkeyPatch.context() as patch:
        record(patch, store, fail_at)
        with pytest.raises(RemoteError, match=r"could not (upload|write) .* on memory://.*the line is dead"):
            store.get_or_build(ACTION, build, kind="checkpoint")
    other = Store(url, cache=tmp_path / "two")
    assert other.lookup(ACTION) is None
    if fail_at < 3:
        with pytest.raises(ArtifactMissingError):
            other.path(store.artifacts()[0])
    assert collect(plan_gc(store, set())) == ()  # what only this machine has is not garbage
    again = Store(url, cache=tmp_path / "one").get_or_build(ACTION, must_not_build, kind="checkpoint")
    assert again.cached and other.get_or_build(ACTION, must_not_build, kind="checkpoint").path.is_dir()
    assert not any((store.root / "unpushed").iterdir())


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_remote_artifact_is_never_used_and_is_made_again(url, tmp_path, damage):
    made = Store(url, cache=tmp_path / "one").get_or_build(ACTION, build, kind="checkpoint")
    fs, path = at(url, f"artifacts/{made.digest}/sub/model.safetensors")
    fs.rm_file(path)
    if damage != "gone":
        fs.pipe_file(path, b"01234" if damage == "cut" else b"0123456780")
    other = Store(url, cache=tmp_path / "two")
    found = other.get_or_build(ACTION, must_not_build, kind="checkpoint")
    with pytest.warns(DamagedArtifact, match="has been withdrawn"), pytest.raises(ArtifactMissingError):
        _ = found.path
    assert other.artifacts() == [] and not any((other.root / "tmp").iterdir())
    again = other.get_or_build(ACTION, build, kind="checkpoint")
    assert not again.cached and again.digest == made.digest
    assert Store(url, cache=tmp_path / "three").get_or_build(ACTION, must_not_build, kind="checkpoint").path.is_dir()


def test_one_faulty_transfer_is_repeated(url, tmp_path, monkeypatch):
    Store(url, cache=tmp_path / "one").get_or_build(ACTION, build, kind="checkpoint")
    real, calls = Remote.download, []

    def download(self, manifest, directory):
        real(self, manifest, directory)
        calls.append(directory)
        if len(calls) == 1:
            (directory / "config.json").write_text("[]")

    monkeypatch.setattr(Remote, "download", download)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Store(url, cache=tmp_path / "two").get_or_build(ACTION, must_not_build, kind="checkpoint").path.is_dir()
    assert len(calls) == 2


def test_a_damaged_cache_is_downloaded_again(url, tmp_path):
    store = Store(url, cache=tmp_path / "one")
    built = store.get_or_build(ACTION, build, kind="checkpoint")
    (built.path / "config.json").unlink()
    with pytest.warns(DamagedArtifact, match="set aside"):
        again = store.get_or_build(ACTION, must_not_build, kind="checkpoint")
    assert again.cached and (again.path / "config.json").read_text() == "{}"


def test_a_collected_cache_is_downloaded_again(url, tmp_path):
    store = Store(url, cache=tmp_path / "one")
    store.get_or_build(ACTION, build, kind="checkpoint")
    assert len(collect(plan_gc(store, set()))) == 2 and store.artifacts() == []
    assert store.get_or_build(ACTION, must_not_build, kind="checkpoint").path.is_dir()


def test_the_first_machine_to_publish_a_key_decides_what_it_made(url, tmp_path):
    one, two = Store(url, cache=tmp_path / "one"), Store(url, cache=tmp_path / "two")

    def other_bytes(directory: Path) -> dict:
        one.get_or_build(ACTION, build, kind="checkpoint")  # the other machine is faster
        (directory / "config.json").write_text("[]")
        return {}

    slower = two.get_or_build(ACTION, other_bytes, kind="checkpoint")
    third = Store(url, cache=tmp_path / "three")
    assert third.lookup(ACTION).digest == one.lookup(ACTION).digest != slower.digest
    assert third.path(slower.digest).is_dir()  # what the slower one builds on is there, too


def test_an_entry_or_manifest_that_was_cut_off_is_not_there(url, tmp_path):
    made = Store(url, cache=tmp_path / "one").get_or_build(ACTION, build, kind="checkpoint")
    fs, path = at(url, f"actions/{ACTION.key}.json")
    fs.pipe_file(path, fs.cat_file(path)[:40])
    other = Store(url, cache=tmp_path / "two")
    with pytest.warns(DamagedArtifact, match="remote entry"):
        assert other.lookup(ACTION) is None
    fs, path = at(url, f"artifacts/{made.digest}/manifest.json")
    fs.pipe_file(path, fs.cat_file(path)[:40])
    with pytest.raises(ArtifactMissingError):
        other.path(made.digest)
    with pytest.warns(DamagedArtifact, match="remote entry"):
        assert not other.get_or_build(ACTION, build, kind="checkpoint").cached
    assert Store(url, cache=tmp_path / "three").get_or_build(ACTION, must_not_build, kind="checkpoint").path.is_dir()


def test_a_manifest_that_names_a_path_outside_is_refused(url, tmp_path):
    made = Store(url, cache=tmp_path / "one").get_or_build(ACTION, build, kind="checkpoint")
    fs, path = at(url, f"artifacts/{made.digest}/manifest.json")
    manifest = json.loads(fs.cat_file(path))
    manifest["files"][0]["path"] = "../../../evil.json"
    fs.pipe_file(path, json.dumps(manifest).encode())
    with pytest.raises(RemoteError, match=r"\.\./\.\./\.\./evil\.json, which is refused"):
        Store(url, cache=tmp_path / "two").path(made.digest)
    assert not list(tmp_path.rglob("evil.json"))


def test_a_url_needs_a_cache_and_a_directory_has_none(tmp_path):
    with pytest.raises(ValueError, match="needs cache"):
        Store("memory://x")
    with pytest.raises(ValueError, match="needs none"):
        Store(tmp_path, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("url", "package"),
    [("s3://bucket/folder", "s3fs"), ("gs://bucket/folder", "gcsfs"), ("abfs://box/folder", "adlfs"), ("sftp://host/folder", "paramiko")],
)
def test_a_missing_backend_is_named_as_the_package_to_install(tmp_path, monkeypatch, url, package):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    with pytest.raises(RemoteError, match=f"pip install {package}"):
        Store(url, cache=tmp_path / "cache")


def test_an_unknown_protocol_is_a_clear_error(tmp_path):
    with pytest.raises(RemoteError, match=r"cannot open a store on 'nosuch://x'.*s3://"):
        Store("nosuch://x", cache=tmp_path / "cache")


def test_a_remote_that_cannot_be_reached_is_a_clear_error_and_nothing_is_built(tmp_path, monkeypatch):
    store = Store(f"memory://{uuid4().hex}", cache=tmp_path / "cache")

    def unreachable(self, path, **more):
        raise TimeoutError("no route")

    monkeypatch.setattr(type(store.remote._fs), "cat_file", unreachable)
    with pytest.raises(RemoteError, match=r"could not read actions/.* on memory://.*no route; check the address and the credentials"):
        store.get_or_build(ACTION, must_not_build, kind="checkpoint")
