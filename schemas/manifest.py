"""What an artifact says of itself. Not here: how it is stored (``warehouse/store.py``)."""

from datetime import datetime
from typing import Any

from pydantic import Field

from assay.schemas.spec import Spec, digest_of

MANIFEST = "manifest.json"


class FileEntry(Spec):
    """A file of an artifact: relative POSIX path, bytes, sha256."""

    path: str
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Action(Spec):
    """What was asked and how it is done: its digest is the cache key. ``parents`` maps a role to an artifact digest."""

    step: dict[str, Any] = Field(description="the step spec, or a base, or a measurement's protocol, as JSON")
    code: str = Field(description="code fingerprint of the op")
    parents: dict[str, str] = {}
    data: dict[str, str] = Field(default={}, description="digests of texts and other inputs")
    seed: int = 0
    versions: dict[str, str] = Field(default={}, description="numerics: torch, transformers, …")

    @property
    def key(self) -> str:
        return digest_of(self)


class Manifest(Spec):
    """The files of an artifact, and the action that first made them. ``summary`` is what the op had to say (removed layers, scores)."""

    digest: str
    files: tuple[FileEntry, ...]
    action: Action
    kind: str
    summary: dict[str, Any] = {}
    build_seconds: float = Field(default=0.0, ge=0)
    built_at: datetime

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)


def artifact_digest(files: tuple[FileEntry, ...]) -> str:
    """sha256 over the sorted (path, sha256) of the files; the manifest itself is not one of them."""
    return digest_of(sorted([entry.path, entry.sha256] for entry in files))
