"""The rules of the house that no linter knows: who may import whom, how long a file may be, that each module says what it is for.

Not here: style (ruff) and types (pyright).
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
LONGEST = 400
LONGER_FOR_A_REASON: dict[str, str] = {
    "tests/warehouse/test_store.py": "one set of helpers serves hits, keys, reasons, failures and damage",
}

# schemas <- ops <- kernels <- assets <- definitions, and schemas <- warehouse <- assets: what each may import of assay.
MAY_IMPORT = {
    "schemas": {"schemas"},
    "ops": {"ops"},
    "kernels": {"kernels", "ops"},
    "warehouse": {"warehouse", "schemas"},
    "assets": {"assets", "warehouse", "kernels", "ops", "schemas"},
    "definitions": {"assets", "warehouse", "kernels", "ops", "schemas"},
}
# They join what is declared to what does it, so they know the specs and whatever is fastest; fingerprints follow their imports.
JOINS = ("ops/apply.py", "ops/measure.py", "ops/steps/", "ops/suites/")
HEAVY = {"torch", "transformers"}


class Import(NamedTuple):
    """One imported module, where, and whether merely importing the file imports it."""

    file: str
    line: int
    module: str
    at_import: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def python_files() -> list[Path]:
    """Every Python file of the repository, from the root: what git tracks, or without git what lies in the folders."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file())
    found = [file for folder in (*MAY_IMPORT, "tests") for file in (ROOT / folder).rglob("*.py")]
    return sorted(file.relative_to(ROOT) for file in [*found, *ROOT.glob("*.py")])


def part(file: str) -> str:
    """The folder of a file, or the module at the root."""
    return file.split("/")[0].removesuffix(".py")


def imports_of(file: str, source: str) -> Iterator[Import]:
    """What a module imports anywhere, also inside functions; ``if TYPE_CHECKING`` counts as an import that is not made at import."""
    yield from _imports(file, ast.parse(source).body, at_import=True)


def _imports(file: str, body: list[ast.stmt], *, at_import: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, at_import)
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            names = [f"assay.{alias.name}" for alias in node.names] if module == "assay" else [module]
            for name in names:
                yield Import(file, node.lineno, name, at_import)
        else:
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            )
            for field in ("body", "orelse", "finalbody"):
                yield from _imports(file, getattr(node, field, []), at_import=at_import and not (lazy and field == "body"))
            for inner in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from _imports(file, inner.body, at_import=at_import)


def every_import() -> list[Import]:
    return [found for file in python_files() for found in imports_of(file.as_posix(), (ROOT / file).read_text(encoding="utf-8"))]


def forbidden(found: Import) -> bool:
    """Whether an import goes against the arrows."""
    here, (package, *rest) = part(found.file), found.module.split(".")
    if here not in MAY_IMPORT:
        return False
    if package in MAY_IMPORT or package == "":
        return True  # `import kernels` and `from . import x`: the folders are importable as parts of assay alone
    if package != "assay":
        return here == "schemas" and package not in {"pydantic", "yaml", *sys.stdlib_module_names}
    target = rest[0] if rest else ""
    return target not in MAY_IMPORT[here] and not (target in {"schemas", "kernels"} and found.file.startswith(JOINS))


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("schemas/a.py", "import torch", ["torch"]),
        ("schemas/a.py", "def f():\n    from assay.ops.b import c", ["assay.ops.b"]),
        ("schemas/a.py", "import pydantic, yaml, json\nfrom assay.schemas.spec import Spec", []),
        ("ops/prune/a.py", "from assay.schemas.steps import Prune", ["assay.schemas.steps"]),
        ("ops/apply.py", "from assay.schemas.steps import Prune", []),
        ("ops/apply.py", "from assay import warehouse", ["assay.warehouse"]),
        ("ops/suites/speed.py", "from assay.kernels.engine import open_engine", []),
        ("ops/decode/a.py", "from assay.kernels.engine import open_engine", ["assay.kernels.engine"]),
        ("ops/a.py", "try:\n    import x\nexcept ImportError:\n    import assay.kernels.a", ["assay.kernels.a"]),
        ("ops/a.py", "match 1:\n    case 1:\n        import assay.assets.a", ["assay.assets.a"]),
        ("kernels/a.py", "from assay.ops.a import b", []),
        ("warehouse/a.py", "from assay.ops.a import b", ["assay.ops.a"]),
        ("assets/a.py", "from assay.definitions import defs", ["assay.definitions"]),
        ("assets/a.py", "from . import b", ["."]),
        ("assets/a.py", "import kernels", ["kernels"]),
    ],
)
def test_the_arrows_are_read_from_any_import_statement(file, source, wrong):
    assert [found.module for found in imports_of(file, source) if forbidden(found)] == wrong


def test_no_import_goes_against_the_arrows():
    wrong = [str(found) for found in every_import() if forbidden(found)]
    assert not wrong, "schemas <- ops <- kernels <- assets <- definitions, schemas <- warehouse <- assets:\n" + "\n".join(wrong)


def test_an_import_inside_a_function_or_for_types_alone_is_not_made_at_import():
    source = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n    import d\nclass C:\n    import e\n"
    assert [found.module for found in imports_of("assets/a.py", source) if found.at_import] == ["a", "c", "e"]


def test_only_ops_and_kernels_import_torch_when_they_are_imported():
    """Definitions are loaded for every step, and importing torch and transformers takes four times as long as all else."""
    light = {"schemas", "warehouse", "assets", "definitions"}
    wrong = [
        str(found) for found in every_import() if found.at_import and part(found.file) in light and found.module.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)
    never = [str(found) for found in every_import() if part(found.file) in {"schemas", "warehouse"} and found.module.split(".")[0] in HEAVY]
    assert not never, "\n".join(never)


def test_no_file_is_longer_than_a_reader_can_hold_unless_it_says_why():
    lengths = {file.as_posix(): len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in python_files()}
    long = {file: length for file, length in lengths.items() if length > LONGEST}
    assert set(long) == set(LONGER_FOR_A_REASON), (
        f"longer than {LONGEST} lines: {long}; split them, or give the reason in LONGER_FOR_A_REASON (and take out what is short again)"
    )


def test_each_module_opens_by_saying_what_belongs_in_it():
    silent = [str(file) for file in python_files() if not ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8")))]
    assert not silent, f"no docstring: {', '.join(silent)}"


def test_no_file_names_a_directory_of_the_machine_it_was_written_on():
    """/opt, /src, /assay and /home/assay are directories of the container images."""
    pattern = re.compile(r"(?<![\w.~/:-])/(?:work|root|Users|farm|home/(?!assay\b))[\w./-]*")
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("without git there is no telling our files from others")
    command = ["git", "grep", "-nIE", "/(work|root|Users|farm|home)", "--", ".", f":!{Path(__file__).relative_to(ROOT)}"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    named = [line for line in lines if pattern.search(line.split(":", 2)[2])]
    assert not named, "\n".join(named)


def test_shapes_are_checked_at_every_call_under_test():
    """The hook in conftest.py works on modules that are imported after it, through the namespace package; this one proves it does."""
    import torch
    from jaxtyping import TypeCheckError, config

    if config.jaxtyping_disable:
        pytest.skip("JAXTYPING_DISABLE=1")
    from assay.ops.decode.verify import verify

    p, q = torch.full((3, 4), 0.25), torch.full((2, 5), 0.2)
    with pytest.raises(TypeCheckError, match="vocab"):
        verify(p, q, [0, 1], torch.Generator())
