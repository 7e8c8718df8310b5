"""The versions of the libraries whose arithmetic a result depends on. Not here: importing any of them (that takes seconds)."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

NUMERICS = ("torch", "transformers")


def numerics_versions(*more: str) -> dict[str, str]:
    """Distribution name → installed version of torch, transformers and ``more``, read from their metadata, nothing imported.

    A step that writes through another library names it (``numerics_versions("compressed-tensors")``), so that upgrading that
    library rebuilds this step and no other.

    Raises:
        LookupError: one is not installed.
    """
    return {name: _version(name) for name in sorted({*NUMERICS, *more})}


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError as error:
        raise LookupError(
            f"the distribution {name!r} is not installed, so a result that depends on it cannot be keyed; pip install {name}"
        ) from error
