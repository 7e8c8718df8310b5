"""The code fingerprint: which code a result depends on, and its digest. Not here: running or importing any of it.

``fingerprint("assay.ops.apply:quantize")`` follows the function ``quantize``, the top-level names of its module that it reaches, and
every module of this repository that any of these imports, inside function bodies too; each of those modules counts whole and is followed
in turn. Modules below ``BY_NAME`` hold declarations that do not act on each other, so of them only the imported names count: a new kind
of step in ``schemas/steps.py`` rebuilds nothing that existed.

What counts is the syntax tree. Comments, docstrings, layout, the order of imports and ``if TYPE_CHECKING:`` blocks do not.

Not seen: imports whose name is computed at run time, and files that are not Python. A module that depends on such files (a C++ source)
lists them, relative to itself, in a top-level ``FINGERPRINT_FILES = ("kernel.cpp",)``, and their bytes count.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from assay.warehouse.source import ALL, FILES, FingerprintError, Import, Module, parse

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "assay"
BY_NAME = ("assay.schemas",)
SCHEME = "1"  # part of every fingerprint: change it when the rules above change

Stamp = tuple[int, int]  # modification time in nanoseconds, size in bytes


def fingerprint(entry: str) -> str:
    """The sha256 (hex) of the code that ``entry`` (``module`` or ``module:name``) reaches in this repository.

    Raises:
        FingerprintError: no such module or name, an import of a module that does not exist, or a file that does not parse.
    """
    return _repository.fingerprint(entry)


def closure(entry: str) -> list[tuple[str, tuple[str, ...]]]:
    """What :func:`fingerprint` counts: sorted (module, names), names being ``("*",)`` for a whole module."""
    return _repository.closure(entry)


@dataclass
class Codebase:
    """The Python files below ``root``, importable as ``package``; parsed once per change of their size or time."""

    root: Path
    package: str = PACKAGE
    by_name: tuple[str, ...] = BY_NAME
    _parsed: dict[Path, tuple[Stamp, Module]] = field(default_factory=dict, repr=False)
    _known: dict[str, tuple[dict[Path, Stamp | None], str]] = field(default_factory=dict, repr=False)

    def fingerprint(self, entry: str) -> str:
        known = self._known.get(entry)
        if known is not None and all(_stamp(path) == stamp for path, stamp in known[0].items()):
            return known[1]
        total, stamps = hashlib.sha256(f"{SCHEME}\n".encode()), {}
        for module, chosen in self._follow(entry):
            statements = [module.statements[index] for index in sorted(chosen)]
            lines = sorted({each.text for each in statements if each.is_import}) + [each.text for each in statements if not each.is_import]
            for name in module.files:
                path = self._listed_path(module, name)
                stamps[path] = _stamp(path)
                lines.append(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
            total.update("\n".join([f"module {module.name}", *lines, ""]).encode("utf-8", "surrogatepass"))
            stamps[module.path] = self._parsed[module.path][0]
        self._known[entry] = stamps, total.hexdigest()
        return self._known[entry][1]

    def closure(self, entry: str) -> list[tuple[str, tuple[str, ...]]]:
        rows: list[tuple[str, tuple[str, ...]]] = []
        for module, chosen in self._follow(entry):
            bound = {name for index in chosen if not module.statements[index].is_import for name in module.statements[index].binds}
            rows.append((module.name, (ALL,) if len(chosen) == len(module.statements) else tuple(sorted(bound))))
        return rows

    def _follow(self, entry: str) -> list[tuple[Module, set[int]]]:
        """The modules that ``entry`` reaches, sorted by name, each with the indices of its statements that count."""
        name, _, symbol = entry.partition(":")
        first = self._module(name, asked_by=f"the entry {entry!r}")
        if first is None:
            raise FingerprintError(
                f"the entry {entry!r} is a folder; expected module or module:function, such as {self.package}.ops.apply:quantize"
            )
        if symbol and symbol not in first.binders:
            known = ", ".join(sorted(each for each in first.binders if not each.startswith("_"))[:12])
            raise FingerprintError(f"{name} has no top-level name {symbol!r}; it has {known or 'none'}")
        met: dict[str, Module | None] = {}  # one look at the disk for a module, however many import it

        def module_of(name: str, *, asked_by: str) -> Module | None:
            if name not in met:
                met[name] = self._module(name, asked_by=asked_by)
            return met[name]

        chosen: dict[str, tuple[Module, set[int]]] = {}
        pending = [(first, symbol or ALL)]
        seen: set[tuple[str, str]] = set()
        while pending:
            module, wanted = pending.pop()
            if (module.name, wanted) in seen:
                continue
            seen.add((module.name, wanted))
            reached = set(range(len(module.statements))) if wanted == ALL else module.reach([wanted])
            already = chosen.setdefault(module.name, (module, set()))[1]
            for index in reached - already:
                for each in module.statements[index].imports:
                    pending += self._resolve(each, module_of, asked_by=module.name)
            already |= reached
        return [chosen[name] for name in sorted(chosen)]

    def _resolve(self, target: Import, module_of: Callable[..., Module | None], *, asked_by: str) -> Iterator[tuple[Module, str]]:
        """The modules that an import runs, each with the name that it wants of it."""
        if target.module != self.package and not target.module.startswith(f"{self.package}."):
            return
        for parent in _parents(target.module):  # their __init__.py runs as well, where there is one
            if (found := module_of(parent, asked_by=asked_by)) is not None:
                yield found, ALL
        found = module_of(target.module, asked_by=asked_by)
        if target.name is not None and (found is None or found.path.name == "__init__.py"):
            if self._exists(f"{target.module}.{target.name}"):
                submodule = module_of(f"{target.module}.{target.name}", asked_by=asked_by)
                if submodule is not None:
                    yield submodule, ALL
            elif found is None:
                raise FingerprintError(f"{asked_by} imports {target.name!r} from {target.module}, a folder that has no module of that name")
        if found is not None:
            declared = any(found.name == prefix or found.name.startswith(f"{prefix}.") for prefix in self.by_name)
            yield found, target.name if declared and target.name in found.binders else ALL

    def _path(self, module: str) -> Path:
        return self.root.joinpath(*module.split(".")[1:])

    def _exists(self, module: str) -> bool:
        path = self._path(module)
        return path.with_name(f"{path.name}.py").is_file() or path.is_dir()

    def _module(self, name: str, *, asked_by: str) -> Module | None:
        """The parsed module ``name``, or None for a folder (a namespace package has no code)."""
        parts = name.split(".")
        if parts[0] != self.package or not all(part.isidentifier() for part in parts):
            raise FingerprintError(
                f"{asked_by} names the module {name!r}; expected one of {self.package}, such as {self.package}.ops.apply"
            )
        path = self._path(name)
        candidates = [path / "__init__.py"] + ([path.with_name(f"{path.name}.py")] if len(parts) > 1 else [])
        for candidate in candidates:
            stamp = _stamp(candidate)
            if stamp is None:
                continue
            cached = self._parsed.get(candidate)
            if cached is None or cached[0] != stamp:
                cached = self._parsed[candidate] = (stamp, parse(candidate, name))
            return cached[1]
        if path.is_dir():
            return None
        raise FingerprintError(
            f"{asked_by} needs the module {name}, but there is no {candidates[-1].relative_to(self.root)} below the repository root"
        )

    def _listed_path(self, module: Module, name: str) -> Path:
        path = module.path.parent / name
        if not path.resolve().is_relative_to(self.root.resolve()) or not path.is_file():
            raise FingerprintError(f"{FILES} of {module.name} lists {name!r}, which is not a file of this repository")
        return path


def _stamp(path: Path) -> Stamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116 (twice as fast as Path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_mtime_ns, status.st_size


def _parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


_repository = Codebase(ROOT)
