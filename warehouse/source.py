"""A source file as the fingerprint sees it: its top-level statements, what each binds and uses, and its normal form. Runs none of it."""

import ast
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

FILES = "FINGERPRINT_FILES"
ALL = "*"


class FingerprintError(ValueError):
    """An entry or an import that names code which is not there."""


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
                self.uses |= _quoted_names(node.value)


@cache
def _quoted_names(text: str) -> frozenset[str]:
    """The names in the quoted part of an annotation, none where it is a shape and no expression; the same few come again and again."""
    with suppress(SyntaxError, ValueError):
        return frozenset(each.id for each in ast.walk(ast.parse(text, mode="eval")) if isinstance(each, ast.Name))
    return frozenset()
