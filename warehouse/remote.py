"""A store on any fsspec URL, seen through a local cache. Not here: the cache, the locks, when to download (``store.py``).

The layout is the local one: ``actions/<key>.json`` and ``artifacts/<digest>/``. An artifact is there when its manifest is, and the manifest
is uploaded after all files, the action entry after the manifest; what an interrupted upload leaves is invisible and is overwritten by
the next. Object stores have no locks: two machines may compute one key at the same time, and the entry that came first stays.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from assay.schemas.manifest import MANIFEST, Manifest
from assay.warehouse.errors import RemoteError
from assay.warehouse.files import copy_atomic, refusal, write_atomic

Result = TypeVar("Result")


class Remote:
    """The artifacts and action entries below ``url`` (``s3://bucket/folder``, ``file:///folder``, ``memory://folder``)."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            RemoteError: the protocol is unknown, or its package is not installed.
        """
        import fsspec  # 0.14 s, which a local store need not pay

        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise RemoteError(
                f"a store on {protocol}:// needs a package that is not installed: pip install {_package_of(protocol, error)}"
            ) from error
        except ValueError as error:
            raise RemoteError(
                f"cannot open a store on {url!r}: {error}; s3://, gs://, abfs://, sftp:// and file:// are some that work"
            ) from error
        self._is_local = protocol in ("file", "local")  # fsspec copies in place there, where object stores replace at once

    def entry(self, key: str) -> str | None:
        """The text of the action entry ``key``, or None."""
        data = self._read(f"actions/{key}.json")
        return None if data is None else data.decode("utf-8", "replace")

    def add_entry(self, key: str, text: str) -> None:
        """Publish an action entry, unless there is one whose artifact is there: the first stays, so that machines agree on what a key made."""
        with suppress(ValueError, TypeError, KeyError):  # what is there does not read: replace it
            there = self.entry(key)
            if there is not None and self.manifest(json.loads(there)["digest"]) is not None:
                return
        self._write(f"actions/{key}.json", text)

    def manifest(self, digest: str) -> Manifest | None:
        """The manifest of an artifact that is there whole, or None."""
        data = self._read(f"artifacts/{digest}/{MANIFEST}")
        if data is None:
            return None
        try:
            manifest = Manifest.model_validate_json(data)
        except ValidationError:  # an interrupted upload on a file system without atomic writes
            return None
        return manifest if manifest.digest == digest else None

    def upload(self, directory: Path, digest: str) -> None:
        """Upload the artifact in ``directory``, its manifest last; nothing when it is there."""
        if self.manifest(digest) is not None:
            return
        text = (directory / MANIFEST).read_text(encoding="utf-8")
        for entry in Manifest.model_validate_json(text).files:
            target = self._at(f"artifacts/{digest}/{entry.path}")
            with self._clear_errors(f"upload {entry.path} of artifact {digest[:12]}"):
                if self._is_local:
                    copy_atomic(directory / entry.path, Path(target))
                else:
                    self._with_parent(target, lambda entry=entry, target=target: self._fs.put_file(str(directory / entry.path), target))
        self._write(f"artifacts/{digest}/{MANIFEST}", text)

    def download(self, manifest: Manifest, directory: Path) -> None:
        """Copy the files that ``manifest`` lists, and it, into ``directory``. Whether all came, and intact, is for the caller to check.

        Raises:
            RemoteError: a file cannot be read, or the manifest lists a file that no artifact may hold.
        """
        for entry in manifest.files:
            if (why := refusal(entry.path)) is not None:
                raise RemoteError(f"artifact {manifest.digest[:12]} on {self.url} lists {entry.path}, which is refused: {why}")
            target = directory / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._clear_errors(f"download {entry.path} of artifact {manifest.digest[:12]}"), suppress(FileNotFoundError):
                self._fs.get_file(self._at(f"artifacts/{manifest.digest}/{entry.path}"), str(target))
        write_atomic(directory / MANIFEST, manifest.model_dump_json(indent=1))

    def withdraw(self, digest: str) -> None:
        """Take back the manifest of a damaged artifact, so that it is missing and the next upload replaces its files."""
        with self._clear_errors(f"withdraw the damaged artifact {digest[:12]}"):
            self._fs.rm_file(self._at(f"artifacts/{digest}/{MANIFEST}"))

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _read(self, path: str) -> bytes | None:
        with self._clear_errors(f"read {path}"):
            try:
                return self._fs.cat_file(self._at(path))
            except FileNotFoundError:
                return None

    def _write(self, path: str, text: str) -> None:
        target = self._at(path)
        with self._clear_errors(f"write {path}"):
            if self._is_local:
                write_atomic(Path(target), text)
            else:
                self._with_parent(target, lambda: self._fs.pipe_file(target, text.encode()))

    def _with_parent(self, target: str, write: Callable[[], Result]) -> Result:
        """Write; where folders are real, make the missing one and write again."""
        try:
            return write()
        except FileNotFoundError:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            return write()

    @contextmanager
    def _clear_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:
            raise RemoteError(
                f"could not {doing} on {self.url}: {type(error).__name__}: {error}; check the address and the credentials, or name a local store"
            ) from error


def _package_of(protocol: str, error: ImportError) -> str:
    """The distribution that serves ``protocol``, as fsspec's own table says."""
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol, {})
    module = known.get("class", "").partition(".")[0]
    if module and module != "fsspec":
        return module
    named = re.search(r'[Ii]nstall (?:the )?"?([\w.-]+)|[Rr]equires "?([\w.-]+)', known.get("err", ""))
    return next((group for group in named.groups() if group), protocol) if named else (error.name or protocol)
