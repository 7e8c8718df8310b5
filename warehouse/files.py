"""The files of an artifact: which may be in one, what they hash to, whether they are still what the manifest says. Not here: where they lie.

Only formats that are data are let in. Pickle runs code when it is read, so nothing of that kind gets into a store and nothing here reads one.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from uuid import uuid4

from pydantic import ValidationError

from assay.schemas.manifest import MANIFEST, FileEntry, Manifest, artifact_digest
from assay.warehouse.errors import RefusedFileError

SUFFIXES = frozenset(
    {".safetensors", ".json", ".jsonl", ".png", ".svg", ".txt", ".md", ".csv", ".parquet", ".jinja", ".model", ".tiktoken"}
)  # .model: sentencepiece; .jinja: chat templates; .tiktoken: merge ranks
BARE_NAMES = frozenset({"LICENSE", "NOTICE", "README"})
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"})


def refusal(path: str) -> str | None:
    """Why ``path`` (relative, POSIX) may not be a file of an artifact, or None."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or "\\" in path or "\0" in path or str(pure) != path or not pure.parts or ".." in pure.parts:
        return "its path leaves the artifact or is not in its plainest form"
    if path == MANIFEST:
        return "that name is the manifest's"
    if pure.suffix.lower() in PICKLES:
        return f"{pure.suffix} may hold pickled objects, which run code when read; save tensors as .safetensors and the rest as .json"
    if pure.suffix.lower() not in SUFFIXES and pure.name not in BARE_NAMES:
        return f"{pure.suffix or 'a name without a suffix'} is not one of {' '.join(sorted(SUFFIXES))}"
    return None


def measure(directory: Path) -> tuple[FileEntry, ...]:
    """The files below ``directory`` with their sizes and sha256, sorted by path; a manifest is left out.

    Raises:
        RefusedFileError: a symlink, a device, or a file that an artifact may not hold.
    """
    entries = []
    for path in sorted(_walk(directory)):
        if path == MANIFEST:
            continue
        full = directory / path
        if full.is_symlink() or not full.is_file():
            raise RefusedFileError(f"{path} is {'a symlink' if full.is_symlink() else 'not a plain file'}; an artifact holds plain files")
        if (why := refusal(path)) is not None:
            raise RefusedFileError(f"an artifact may not hold {path}: {why}")
        entries.append(FileEntry(path=path, size_bytes=full.stat().st_size, sha256=sha256_of(full)))
    return tuple(entries)


def faults(directory: Path, digest: str, *, contents: bool) -> Iterator[tuple[str, str]]:
    """What is wrong with the artifact ``digest`` in ``directory``, as (file, fault); nothing when it is sound.

    Args:
        contents: also read every byte and compare it, and report files that the manifest does not list. Without it only the manifest
            and the sizes are looked at, which takes microseconds.
    """
    try:
        manifest = Manifest.model_validate_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        yield MANIFEST, "is missing"
        return
    except (ValidationError, OSError) as error:
        yield MANIFEST, f"does not read: {type(error).__name__}"
        return
    if manifest.digest != digest or artifact_digest(manifest.files) != digest:
        yield MANIFEST, "describes another artifact"
        return
    for entry in manifest.files:
        if (fault := _fault_of(directory, entry, contents=contents)) is not None:
            yield entry.path, fault
    if contents:
        for extra in sorted(set(_walk(directory)) - {entry.path for entry in manifest.files} - {MANIFEST}):
            yield extra, "is not listed in the manifest"


def _fault_of(directory: Path, entry: FileEntry, *, contents: bool) -> str | None:
    if (why := refusal(entry.path)) is not None:
        return f"is refused: {why}"
    path = directory / entry.path
    if path.is_symlink() or not path.is_file():
        return "is missing" if not os.path.lexists(path) else "is not a plain file"
    if (size := path.stat().st_size) != entry.size_bytes:
        return f"has {size:,} bytes, the manifest says {entry.size_bytes:,}"
    if contents and (found := sha256_of(path)) != entry.sha256:
        return f"has sha256 {found[:12]}…, the manifest says {entry.sha256[:12]}…"
    return None


def size_of(directory: Path) -> int:
    """Bytes of all files below ``directory``."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_symlink() or path.is_file())


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _walk(directory: Path) -> Iterator[str]:
    """Relative POSIX paths of all that is not a directory; links are not followed."""
    for folder, folders, names in os.walk(directory, followlinks=False):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in [*names, *links]:
            yield Path(folder, name).relative_to(directory).as_posix()


def seal(directory: Path) -> None:
    """Make the files below ``directory`` read-only, and everything in it durable."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            path.chmod(0o444)
            sync(path)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Have the kernel write a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str, *, beside: Path | None = None) -> None:
    """Write ``path`` so that a reader, or a crash at any moment, meets the whole old text or the whole new one.

    Args:
        beside: a directory of the same file system for the temporary file; the directory of ``path`` by default.
    """
    _replace(path, lambda part: part.write_text(text, encoding="utf-8"), beside or path.parent)


def copy_atomic(source: Path, path: Path) -> None:
    """Copy the contents of a file, as :func:`write_atomic` writes a text."""
    _replace(path, lambda part: shutil.copyfile(source, part), path.parent)


def _replace(path: Path, write: Callable[[Path], object], beside: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = beside / f".{uuid4().hex}.part"
    try:
        write(part)
        sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)
