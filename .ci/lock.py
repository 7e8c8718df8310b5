"""Print requirements.lock: each package that pyproject.toml needs, at the version that this environment holds.

Belongs here: walking the requirements of the installed packages. Does not: choosing versions (pip does that, before this runs).
What pyproject.toml needs on some machines alone is pinned for these alone, and has to be installed here.
Run it with the environment's own Python (``make lock``); its output depends on nothing but pyproject.toml and that environment.
"""

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# Every package that Assay needs to run and to be tested, pinned. `make` installs them into .venv.
#
# To take newer releases, let pip choose them, test, and write down what it chose:
#
#     .venv/bin/pip install --upgrade PACKAGE ...
#     make test
#     make lock
#
# Made on {system} with Python {python}; do not edit by hand.
# torch is pinned without a build label, so that pip takes the build (CPU or CUDA) that its index offers for the machine.
"""


def pins(wanted: Iterable[str]) -> dict[str, str]:
    """Name to version of ``wanted`` and of all that they require here, extras and markers obeyed.

    Raises:
        SystemExit: a requirement is not installed, or the installed version does not satisfy it.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(text), "pyproject.toml") for text in wanted]
    while todo:
        requirement, asker = todo.pop()
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            sys.exit(f"{asker} needs {requirement}, which is not installed here; install it and run `make lock` again")
        if not requirement.specifier.contains(package.version, prereleases=True):
            sys.exit(f"{asker} needs {requirement}, but {package.version} is installed; install one that fits and run `make lock` again")
        name = canonicalize_name(requirement.name)
        found[name] = Version(package.version).public
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in package.requires or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append((needed, name))
    return found


def main() -> None:
    """Write the lock file to standard output."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"] + project["build-system"]["requires"]
    python = ".".join(map(str, sys.version_info[:2]))
    print(HEADER.format(system=sys.platform, python=python))
    asked = map(Requirement, wanted)
    where = {canonicalize_name(requirement.name): f"; {requirement.marker}" for requirement in asked if requirement.marker}
    for name, version in sorted(pins(wanted).items()):
        print(f"{name}=={version}{where.get(name, '')}")


if __name__ == "__main__":
    main()
