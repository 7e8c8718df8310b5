"""The local directory of a store: its layout, and what keeps it sound. Not here: building, looking up and URLs (``store.py``).

actions/<key>.json     what was asked (the whole action), and the digest of what came out
artifacts/<digest>/    an immutable directory: the files and manifest.json
kinds/<kind>/<key>     empty; finds the earlier actions of one kind without reading them all
unpushed/<key>         empty; made here and not yet uploaded (only where the store is on a URL)
tmp/<id>, <id>.lock    work in progress, whose lock is held while its process lives; what a killed one leaves is removed by the next
quarantine/            damaged artifacts and entries, set aside
locks/                 one per key in work; ``publish`` guards the moments in which an artifact appears or goes
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from assay.warehouse.actions import Entry, kind_of
from assay.warehouse.errors import DamagedArtifact
from assay.warehouse.files import faults, size_of, write_atomic
from assay.warehouse.locks import hold, try_hold

RECENT = 64  # earlier actions of a kind that are looked at to say what changed, or how long it takes
HEX = re.compile(r"[0-9a-f]{64}")
FOLDERS = ("actions", "artifacts", "kinds", "unpushed", "tmp", "quarantine", "locks")


@dataclass(frozen=True)
class Problem:
    """A fault that :meth:`Store.verify` found. ``quarantined`` is where the artifact has been put, if it has."""

    digest: str
    file: str
    fault: str
    quarantined: Path | None = None

    def __str__(self) -> str:
        return f"artifact {self.digest[:12]}: {self.file} {self.fault}" + (f"; set aside in {self.quarantined}" if self.quarantined else "")


class Shelf:
    """A local directory of artifacts and entries."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        for name in FOLDERS:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.sweep()

    # ---- where things are

    def artifact_path(self, digest: str) -> Path:
        return self.root / "artifacts" / _checked(digest)

    def action_path(self, key: str) -> Path:
        return self.root / "actions" / f"{_checked(key)}.json"

    def kind_path(self, label: str) -> Path:
        return self.root / "kinds" / (re.sub(r"[^A-Za-z0-9_-]", "_", label)[:80] or "_")

    def quarantine_path(self, name: str) -> Path:
        return self.root / "quarantine" / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid4().hex[:8]}"

    def lock_path(self, name: str) -> Path:
        return self.root / "locks" / f"{name}.lock"

    # ---- entries

    def actions(self) -> Iterator[Entry]:
        """The entries that are held locally; those that do not read are passed over."""
        for path in sorted((self.root / "actions").glob("*.json")):
            if (entry := self.peek(path.stem)) is not None:
                yield entry

    def peek(self, key: str) -> Entry | None:
        """A local entry, unchecked; None when it is missing or does not read."""
        try:
            return Entry.model_validate_json(self.action_path(key).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def recent(self, label: str) -> list[Entry]:
        """The newest entries of a step kind, the newest first."""
        try:
            with os.scandir(self.kind_path(label)) as markers:
                keys = [name for _, name in sorted(((marker.stat().st_mtime_ns, marker.name) for marker in markers), reverse=True)]
        except FileNotFoundError:
            return []
        return [entry for key in keys[:RECENT] if (entry := self.peek(key)) is not None]

    def write_entry(self, entry: Entry) -> None:
        write_atomic(self.action_path(entry.key), entry.model_dump_json(indent=1))
        marker = self.kind_path(kind_of(entry.action, entry.kind)) / entry.key
        marker.parent.mkdir(exist_ok=True)
        marker.touch()

    def forget(self, entry: Entry) -> None:
        """Remove a local entry; its artifact stays until the garbage collector finds that nothing names it."""
        self.action_path(entry.key).unlink(missing_ok=True)
        (self.kind_path(kind_of(entry.action, entry.kind)) / entry.key).unlink(missing_ok=True)

    # ---- artifacts

    def artifacts(self) -> list[str]:
        """Digests of the artifacts that are held locally, sound or not."""
        return sorted(path.name for path in (self.root / "artifacts").iterdir() if HEX.fullmatch(path.name))

    def size(self) -> int:
        """Bytes of the artifacts that are held locally."""
        return sum(size_of(self.artifact_path(digest)) for digest in self.artifacts())

    def fault(self, digest: str) -> str | None:
        """Why an artifact cannot be used, or None. A damaged one is set aside, with a warning."""
        directory = self.artifact_path(digest)
        seen = _identity(directory)
        if seen is None:
            return f"the artifact {digest[:12]} is not in the store {self.root}"
        found = next(faults(directory, digest, contents=False), None)
        if found is None:
            return None
        aside = self.set_aside(digest, [found], seen)
        if aside is None:  # another process has replaced it meanwhile
            return self.fault(digest)
        text = f"the artifact {digest[:12]} was damaged ({' '.join(found)}) and has been set aside in {aside}"
        warnings.warn(f"{text}; it will be made again when it is asked for", DamagedArtifact, stacklevel=3)
        return text

    def set_aside(self, digest: str, found: list[tuple[str, str]], seen: int | None) -> Path | None:
        """Move a damaged artifact into quarantine, unless it is no longer the one that was ``seen``."""
        directory, aside = self.artifact_path(digest), self.quarantine_path(digest)
        with hold(self.lock_path("publish")):
            if _identity(directory) != seen:
                return None
            directory.rename(aside)
        (aside / "why.txt").write_text("".join(f"{file} {fault}\n" for file, fault in found), encoding="utf-8")
        return aside

    def verify(self, digests: Iterable[str] | None = None, *, quarantine: bool = False) -> Iterator[Problem]:
        """Read every byte of the artifacts (all local ones by default) and yield what is wrong; set the damaged ones aside if asked."""
        for digest in self.artifacts() if digests is None else digests:
            directory = self.artifact_path(digest)
            if not directory.exists():
                yield Problem(digest, "", "is not in the store")
                continue
            seen = _identity(directory)
            found = list(faults(directory, digest, contents=True))
            aside = self.set_aside(digest, found, seen) if found and quarantine else None
            yield from (Problem(digest, file, fault, aside) for file, fault in found)

    # ---- work in progress

    def sweep(self) -> int:
        """Remove what killed processes left in ``tmp``; never the work of a live one. Returns how many were removed."""
        removed = 0
        for name in {path.name.removesuffix(".lock") for path in (self.root / "tmp").iterdir()}:
            leftover = self.root / "tmp" / name
            # What belongs to another user of a shared store is that user's to remove.
            with suppress(PermissionError), try_hold(self.root / "tmp" / f"{name}.lock") as is_dead:
                if is_dead and leftover.exists():
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                    removed += 1
        return removed

    @contextmanager
    def workspace(self, uses: Iterable[str] = ()) -> Iterator[Path]:
        """A directory in ``tmp`` that is removed at the end, and by the next sweep if this process is killed.

        Args:
            uses: digests of artifacts that the work reads; the garbage collector keeps them meanwhile.
        """
        name = uuid4().hex
        with hold(self.root / "tmp" / f"{name}.lock"):
            directory = self.root / "tmp" / name
            directory.mkdir()
            try:
                (directory / "uses.json").write_text(json.dumps(sorted(uses)), encoding="utf-8")
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def in_use(self) -> set[str]:
        """Digests that work in progress, of any process, has said it reads."""
        digests: set[str] = set()
        for path in (self.root / "tmp").glob("*/uses.json"):
            try:
                digests.update(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError):  # it ended, or is being written: then it has read nothing yet
                continue
        return digests


def _checked(digest: str) -> str:
    if HEX.fullmatch(digest) is None:
        raise ValueError(f"{digest!r} is not a key or digest; expected 64 hexadecimal digits")
    return digest


def _identity(directory: Path) -> int | None:
    """The inode of a directory: a damaged artifact and the one that replaces it differ in it."""
    try:
        return directory.stat().st_ino
    except FileNotFoundError:
        return None
