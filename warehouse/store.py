"""The store of artifacts and the cache of actions. Not here: what an action is (``schemas/manifest.py``), how one is carried out (``ops``).

Two processes that ask for one key compute it once. Everything appears by one rename or replace, after an fsync, and the action entry
last, so a process killed at any moment leaves nothing that could be taken for a result, and no lock that needs a person.
"""

import errno
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from assay.schemas.manifest import MANIFEST, Action, Manifest, artifact_digest
from assay.schemas.spec import canonical_json, digest_of
from assay.warehouse.actions import Entry, difference, kind_of
from assay.warehouse.errors import (
    ActionMismatchError,
    ArtifactMissingError,
    DamagedArtifact,
    EmptyArtifactError,
    StoreError,
    StoreFullError,
)
from assay.warehouse.files import faults, measure, seal, sync
from assay.warehouse.locks import hold
from assay.warehouse.remote import Remote
from assay.warehouse.shelf import Shelf

SHOWN = 8  # differences that are spelt out


@dataclass(frozen=True)
class Built:
    """What :meth:`Store.get_or_build` found or made.

    ``seconds`` is what the build took when it was made, so of a hit what it saved; ``reason`` says why it was not a hit;
    ``summary`` is what the build had to say.
    """

    digest: str
    cached: bool
    reason: str | None
    seconds: float
    summary: dict[str, Any]
    store: "Store" = field(repr=False, compare=False)

    @property
    def path(self) -> Path:
        """The artifact's local directory. In a store on a URL this is where a hit is downloaded, so a hit that nobody opens costs nothing."""
        return self.store.path(self.digest)


class Store(Shelf):
    """Artifacts below a directory, or below an fsspec URL with the directory ``cache`` in front of it."""

    def __init__(self, root: Path | str, cache: Path | str | None = None) -> None:
        """
        Args:
            root: a directory (made if missing), ``file:///directory``, or another fsspec URL such as ``s3://bucket/folder``.
            cache: the local directory in front of a URL.
        Raises:
            ValueError: a URL without a cache, or a cache without a URL.
            RemoteError: the protocol of the URL is unknown or its package not installed.
        """
        text = str(root)
        is_url = "://" in text and not (text.startswith("file://") and cache is None)
        if is_url and cache is None:
            raise ValueError(f"the store {text} is on a URL and needs cache: a local directory that holds what is in use")
        if not is_url and cache is not None:
            raise ValueError(f"cache={str(cache)!r} goes with a store on a URL (s3://…, file://…); {text} is a directory, which needs none")
        self.remote = Remote(text) if is_url else None
        super().__init__(Path(cache if is_url and cache is not None else text.removeprefix("file://")))

    # ---- reading

    def lookup(self, asked: Action | str) -> Entry | None:
        """The entry of an action, or of a key; None when there is none. One small file is read.

        Raises:
            ActionMismatchError: the entry holds another action than ``asked``, or than its key is the digest of.
        """
        key = asked if isinstance(asked, str) else asked.key
        path = self.action_path(key)
        try:
            text, is_local = path.read_bytes(), True
        except FileNotFoundError:
            text, is_local = (self.remote.entry(key) if self.remote else None), False
        if text is None:
            return None
        try:
            raw = json.loads(text)
            entry = Entry.model_validate_json(text)
        except ValueError as error:
            warnings.warn(
                f"the {'local' if is_local else 'remote'} entry {path.name} does not read: {error}; it is left aside",
                DamagedArtifact,
                stacklevel=2,
            )
            if not is_local:
                return None
            with suppress(FileNotFoundError):  # another process was faster
                path.rename(self.quarantine_path(path.name))
            return self.lookup(asked)
        stored = canonical_json(raw["action"])
        if entry.key != key or digest_of(raw["action"]) != key or (isinstance(asked, Action) and stored != canonical_json(asked)):
            wanted = f"; asked: {canonical_json(asked)}" if isinstance(asked, Action) else ""
            raise ActionMismatchError(
                f"the entry {path.name} holds another action than its key stands for, so its artifact cannot be trusted: {stored}{wanted}; "
                f"remove {path if is_local else f'actions/{path.name} of the remote store'} if it was edited by hand"
            )
        if not is_local:
            self.write_entry(entry)
        return entry

    def path(self, digest: str) -> Path:
        """The directory of an artifact, after a look at its manifest and file sizes; downloaded first where the store is on a URL.

        Raises:
            ArtifactMissingError: there is none, or it was damaged and has been set aside (a warning says so as well).
            RemoteError: it could not be downloaded.
        """
        if (fault := self.fault(digest)) is None:
            return self.artifact_path(digest)
        if self.remote is not None and self._download(digest, self.remote):
            return self.artifact_path(digest)
        raise ArtifactMissingError(fault)

    def manifest(self, digest: str) -> Manifest:
        """The manifest of an artifact; of a remote one without downloading the artifact.

        Raises:
            ArtifactMissingError: there is no such artifact, or no readable manifest.
        """
        try:
            return Manifest.model_validate_json((self.artifact_path(digest) / MANIFEST).read_bytes())
        except (FileNotFoundError, ValidationError):
            found = self.remote.manifest(digest) if self.remote else None
            if found is None:
                raise ArtifactMissingError(f"the artifact {digest[:12]} is not in the store {self.root}") from None
            return found

    def seconds_of(self, kind: str) -> list[float]:
        """Seconds that the recent builds of a step kind took, the newest first: what to expect of the next."""
        return [entry.seconds for entry in self.recent(kind)]

    def explain(self, action: Action, *, kind: str) -> str:
        """How ``action`` differs from the nearest earlier action of its kind: ``step.group_size 64 → 32; code changed``."""
        label = kind_of(action, kind)
        differences = [difference(entry.action, action) for entry in self.recent(label)]
        if not differences:
            return f"there is no earlier {label}"
        nearest = min(differences, key=len)  # of equals the newest
        more = [f"and {len(nearest) - SHOWN} more"] if len(nearest) > SHOWN else []
        return f"unlike the nearest earlier {label}: {'; '.join([*nearest[:SHOWN], *more])}"

    # ---- building

    def get_or_build(self, action: Action, build: Callable[[Path], dict[str, Any]], *, kind: str) -> Built:
        """The artifact of ``action``: from the store if it is there, else made by ``build`` and published.

        Args:
            build: writes the files into the empty directory that it is given, and returns a summary (JSON, no NaN). It runs once even
                when several processes ask, and only on a miss. When it raises, nothing is kept.
            kind: what the artifact is: ``checkpoint``, ``hidden_states``, …
        Raises:
            ActionMismatchError: see :meth:`lookup`.
            EmptyArtifactError: ``build`` wrote no file.
            RefusedFileError: it wrote a file that an artifact may not hold.
            StoreFullError: the disk is full.
            RemoteError: the upload failed; the artifact is kept locally, and asking again uploads it.
        """
        key = action.key
        hit, fault = self._find(action)
        if hit is None:
            with hold(self.lock_path(key), waiting_for=f"another process that makes {kind_of(action, kind)} {key[:12]}"):
                hit, fault_now = self._find(action)  # the other process may have made it
                if hit is None:
                    hit = self._make(action, build, kind, fault or fault_now)
        if self.remote is not None and (self.root / "unpushed" / key).exists():
            self.push(key)
        return hit

    def hit(self, action: Action) -> Built | None:
        """The artifact of ``action`` if it is here and whole, or on the URL; nothing is built and nothing downloaded."""
        return self._find(action)[0]

    def _find(self, action: Action) -> tuple[Built | None, str | None]:
        """A hit, or why the entry that there is cannot be one."""
        entry = self.lookup(action)
        if entry is None:
            return None, None
        fault = self.fault(entry.digest)
        if fault is not None and (self.remote is None or self.remote.manifest(entry.digest) is None):
            return None, fault
        return Built(entry.digest, True, None, entry.seconds, entry.summary, self), None

    def _make(self, action: Action, build: Callable[[Path], dict[str, Any]], kind: str, fault: str | None) -> Built:
        self.sweep()
        before = self.peek(action.key)
        reason = fault or self.explain(action, kind=kind)
        uses = [*action.parents.values(), *action.data.values()]
        with self._clear_when_full(), self.workspace(uses) as work:
            target = work / "artifact"
            target.mkdir()
            started = time.perf_counter()
            summary = build(target)
            seconds = time.perf_counter() - started
            if not isinstance(summary, dict):
                raise TypeError(
                    f"the build of {kind_of(action, kind)} returned {summary!r}; expected its summary, a dict (which may be empty)"
                )
            try:
                summary = json.loads(canonical_json(summary))
            except (TypeError, ValueError) as error:
                raise TypeError(f"the summary of {kind_of(action, kind)} is not JSON of finite numbers: {error}") from error
            files = measure(target)
            if not files:
                raise EmptyArtifactError(
                    f"the build of {kind_of(action, kind)} {action.key[:12]} wrote no file; a step that makes nothing is not cached"
                )
            digest = artifact_digest(files)
            now = datetime.now(UTC)
            manifest = Manifest(digest=digest, files=files, action=action, kind=kind, summary=summary, build_seconds=seconds, built_at=now)
            (target / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
            seal(target)
            entry = Entry(key=action.key, action=action, kind=kind, digest=digest, summary=summary, seconds=seconds, built_at=now)
            self._publish(target, digest, entry)
        if before is not None and before.digest != digest:
            warnings.warn(
                f"made again, {kind_of(action, kind)} {action.key[:12]} has other bytes than before ({digest[:12]}, was {before.digest[:12]}): "
                "the step is not deterministic, and what follows it will be made again too",
                stacklevel=3,
            )
        return Built(digest, False, reason, seconds, summary, self)

    def _publish(self, directory: Path, digest: str, entry: Entry | None) -> None:
        """Move a sealed directory to its digest, unless a sound artifact is there (early cut-off), and then write the entry that names it."""
        self.fault(digest)  # a damaged one that is in the way goes into quarantine
        with hold(self.lock_path("publish")):
            final = self.artifact_path(digest)
            if not final.exists():
                directory.rename(final)
                sync(final.parent)  # before the entry that names it
            if entry is not None:
                if self.remote is not None:
                    (self.root / "unpushed" / entry.key).touch()
                self.write_entry(entry)

    def push(self, key: str) -> None:
        """Upload the artifact and the entry of ``key``, the files first and the entry last. Nothing where the store is a directory.

        Raises:
            RemoteError: the upload failed; nothing of it is visible, and it can be tried again.
        """
        if self.remote is None:
            return
        entry = self.peek(key)
        if entry is not None and self.fault(entry.digest) is None:
            self.remote.upload(self.artifact_path(entry.digest), entry.digest)
            self.remote.add_entry(key, entry.model_dump_json(indent=1))
        (self.root / "unpushed" / key).unlink(missing_ok=True)

    def _download(self, digest: str, remote: Remote) -> bool:
        """Fetch an artifact into the cache; False when the remote store has none, or a damaged one, which is then withdrawn."""
        fault = None
        with hold(self.lock_path(f"download-{digest}"), waiting_for=f"another process that downloads {digest[:12]}"):
            if self.fault(digest) is None:
                return True
            for _ in range(2):  # the transfer may have been at fault
                manifest = remote.manifest(digest)
                if manifest is None:
                    return False
                with self._clear_when_full(), self.workspace([digest]) as work:
                    target = work / "artifact"
                    remote.download(manifest, target)
                    fault = next(faults(target, digest, contents=True), None)
                    if fault is None:
                        seal(target)
                        self._publish(target, digest, None)
                        return True
            remote.withdraw(digest)
        text = (
            f"the artifact {digest[:12]} on {remote.url} is damaged ({' '.join(fault or ())}); it has been withdrawn and will be made again"
        )
        warnings.warn(text, DamagedArtifact, stacklevel=3)
        return False

    @contextmanager
    def _clear_when_full(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, StoreError) or not _is_full(error):
                raise
            free = shutil.disk_usage(self.root).free
            raise StoreFullError(
                f"no space left for the store {self.root} ({free:,} bytes free): {error}; nothing of this step was kept. "
                "`assay gc` shows what can be removed; or put the store on a larger disk"
            ) from error


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk or quota is behind ``error``; libraries in other languages tell it only in their text."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
