"""The code fingerprint: which code a result depends on, and its digest. Not here: running or importing any of it.

``fingerprint("assay.ops.apply:quantize")`` follows the function ``quantize``, the top-level names of its module that it reaches, and
every module of this repository that any of these imports, inside function bodies too; each of those modules counts whole and is followed
in turn. Modules below ``BY_NAME`` hold declarations that do not act on each other, so of them only the imported names count: a new kind
of step in ``schemas/steps.py`` rebuilds nothing that existed.

What counts is the syntax tree. Comments, docstrings, layout, the order of imports and ``if TYPE_CHECKING:`` blocks do not.

Not seen: imports whose name is computed at run time, and files that are not Python. A module that depends on such files (a C++ source)
lists them, relative to itself, in a top-level ``FINGERPRINT_FILES = ("kernel.cpp",)``, and their bytes count.
"""

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "assay"
BY_NAME = ("assay.schemas",)
FILES = "FINGERPRINT_FILES"
SCHEME = "1"  # part of every fingerprint: change it when the rules above change

ALL = "*"
Stamp = tuple[int, int]  # modification time in nanoseconds, size in bytes


class FingerprintError(ValueError):
    """An entry or an import that names code which is not there."""


def fingerprint(entry: str) -> str:
    """The sha256 (hex) of the code that ``entry`` (``module`` or ``module:name``) reaches in this repository.

    Raises:
        FingerprintError: no such module or name, an import of a module that does not exist, or a file that does not parse.
    """
    return _repository.fingerprint(entry)


def closure(entry: str) -> list[tuple[str, tuple[str, ...]]]:
    """What :func:`fingerprint` counts: sorted (module, names), names being ``("*",)`` for a whole module."""
    return _repository.closure(entry)


@dataclass(frozen=True)
class Import:
    """``import module`` (``name`` None) or ``from module import name``, relative ones resolved."""

    module: str
    name: str | None = None


@dataclass(frozen=True)
class Statement:
    """A top-level statement (of an import, one alias): the names that it binds and uses, what it imports, and its normal form."""

    text: str
    binds: frozenset[str]
    uses: frozenset[str]
    imports: tuple[Import, ...]
    decorators: frozenset[str] = frozenset()  # the names in its decorators
    is_import: bool = False
    always: bool = False  # acts when the module is imported, so it counts whichever name is asked for


@dataclass(frozen=True)
class Module:
    """A parsed file."""

    name: str
    path: Path
    statements: tuple[Statement, ...]
    binders: dict[str, list[int]]
    files: tuple[str, ...]

    def reach(self, names: Iterable[str]) -> set[int]:
        """Indices of the statements that ``names`` need, transitively, and of those that always count."""
        found: set[int] = set()
        pending = [index for index, statement in enumerate(self.statements) if statement.always]
        pending += [index for name in names for index in self.binders.get(name, ())]
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                pending += [other for name in self.statements[index].uses for other in self.binders.get(name, ())]
        return found


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
                    pending += self._resolve(each, asked_by=module.name)
            already |= reached
        return [chosen[name] for name in sorted(chosen)]

    def _resolve(self, target: Import, *, asked_by: str) -> Iterator[tuple[Module, str]]:
        """The modules that an import runs, each with the name that it wants of it."""
        if target.module != self.package and not target.module.startswith(f"{self.package}."):
            return
        for parent in _parents(target.module):  # their __init__.py runs as well, where there is one
            if (found := self._module(parent, asked_by=asked_by)) is not None:
                yield found, ALL
        found = self._module(target.module, asked_by=asked_by)
        if target.name is not None and (found is None or found.path.name == "__init__.py"):
            if self._exists(f"{target.module}.{target.name}"):
                submodule = self._module(f"{target.module}.{target.name}", asked_by=asked_by)
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


_repository = Codebase(ROOT)


def parse(path: Path, name: str) -> Module:
    """Read the file ``path`` as the module ``name``.

    Raises:
        FingerprintError: not Python.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise FingerprintError(f"{path} does not parse as Python: {error}") from error
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    statements: list[Statement] = []
    files: tuple[str, ...] = ()
    for node in _executed(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements += _aliases(node, package)
        else:
            statements.append(_statement(node, package))
            if FILES in statements[-1].binds:
                files = _listed(node, path)
    ours = {bound for each in statements if _is_ours(each, name.partition(".")[0]) for bound in each.binds}
    # A function that a decorator of this repository wraps may be registered by it, and then acts without being named.
    statements = [replace(each, always=True) if each.decorators & ours else each for each in statements]
    binders: dict[str, list[int]] = {}
    for index, statement in enumerate(statements):
        for bound in statement.binds:
            binders.setdefault(bound, []).append(index)
    return Module(name, path, tuple(statements), binders, files)


def _is_ours(statement: Statement, package: str) -> bool:
    return not statement.is_import or any(each.module.partition(".")[0] == package for each in statement.imports)


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that do something: without bare constants (docstrings), ``pass``, and what only a type checker reads."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _executed(node.orelse)
        elif not _is_idle(node):
            yield node


def _is_idle(node: object) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _imports(node: ast.Import | ast.ImportFrom, package: str) -> list[Import]:
    if isinstance(node, ast.Import):
        return [Import(alias.name) for alias in node.names]
    base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    return [Import(module, alias.name) for alias in node.names]


def _aliases(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[Statement]:
    """A top-level import, one statement for each alias."""
    for alias, target in zip(node.names, _imports(node, package), strict=True):
        bound = alias.asname or (alias.name if target.name else alias.name.partition(".")[0])
        yield Statement(
            text=f"import {target.module} {target.name or ''} as {bound if alias.asname or target.name else ''}",
            binds=frozenset({bound}),
            uses=frozenset(),
            imports=(target if target.name != "*" else Import(target.module),),
            is_import=True,
            always=target.name == "*" or target.module == "__future__",
        )


def _statement(node: ast.stmt, package: str) -> Statement:
    reader = _Reader(package)
    reader.read(node)
    binds, acts = _bound(node)
    decorators = getattr(node, "decorator_list", [])
    return Statement(
        text="".join(reader.out),
        binds=frozenset(binds | reader.globals),
        uses=frozenset(reader.uses),
        imports=tuple(reader.imports),
        decorators=frozenset(inner.id for each in decorators for inner in ast.walk(each) if isinstance(inner, ast.Name)),
        always=acts or binds <= {"_"} or FILES in binds,
    )


def _bound(node: ast.AST) -> tuple[set[str], bool]:
    """The module-level names that a statement binds, and whether it also acts on something else (calls, sets an item or attribute)."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}, False
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return set(), False
    binds: set[str] = set()
    acts = isinstance(node, ast.Expr | ast.Delete | ast.Assert | ast.Raise) and not _is_idle(node)
    if isinstance(node, ast.Import | ast.ImportFrom):
        binds |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        binds.add(node.id)
    elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
        acts = True
    elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name:
        binds.add(node.name)
    for child in ast.iter_child_nodes(node):
        inner, inner_acts = _bound(child)
        binds |= inner
        acts |= inner_acts
    return binds, acts


def _listed(node: ast.stmt, path: Path) -> tuple[str, ...]:
    try:
        names = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    except (ValueError, AttributeError) as error:
        raise FingerprintError(
            f"{FILES} in {path} must be a literal tuple of file names, so that it can be read without running it"
        ) from error
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise FingerprintError(f"{FILES} in {path} must be a tuple of file names; it is {names!r}")
    return tuple(names)


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""


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


_FIELDS: dict[type, tuple[tuple[str, str], ...]] = {}  # type of node → its fields that count, with their labels
_NOTED = frozenset({ast.Name, ast.Global, ast.Import, ast.ImportFrom, ast.Call})


class _Reader:
    """Writes the normal form of a node into ``out``, and notes the names that it uses and the modules that it imports.

    Its own writer instead of ``ast.dump``: that one prints other text on other versions of Python.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.out: list[str] = []
        self.uses: set[str] = set()
        self.globals: set[str] = set()
        self.imports: list[Import] = []

    def read(self, node: object) -> None:
        kind, out = type(node), self.out
        fields = _FIELDS.get(kind)
        if fields is None:
            if not isinstance(node, ast.AST):
                out.append(f"{node!r},")
                return
            fields = _FIELDS[kind] = tuple((name, f"{name}=") for name in node._fields if name not in ("ctx", "kind", "type_comment"))
        if kind in _NOTED:
            self._note(node)
        out.append(f"{kind.__name__}(")
        for name, label in fields:
            value = getattr(node, name, None)
            if value is None or value == []:
                continue
            out.append(label)
            if type(value) is list:
                out.append("[")
                for each in value:
                    if not _is_idle(each):
                        self.read(each)
                out.append("]")
            else:
                if name in ("annotation", "returns"):
                    self._note_annotation(value)
                self.read(value)
        out.append(")")

    def _note(self, node: object) -> None:
        if isinstance(node, ast.Name):
            self.uses.add(node.id)
        elif isinstance(node, ast.Global):
            self.globals.update(node.names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imports += [each if each.name != "*" else Import(each.module) for each in _imports(node, self.package)]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                self.imports.append(Import(target.value))

    def _note_annotation(self, annotation: Any) -> None:
        """Names inside the quoted parts of an annotation."""
        for node in ast.walk(annotation):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                with suppress(SyntaxError, ValueError):
                    self.uses |= {each.id for each in ast.walk(ast.parse(node.value, mode="eval")) if isinstance(each, ast.Name)}
