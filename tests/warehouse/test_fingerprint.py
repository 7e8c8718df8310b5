"""The fingerprint changes with the code that a result depends on, and with nothing else."""

import os
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from assay.warehouse.fingerprint import ROOT, Codebase, FingerprintError, closure, fingerprint
from assay.warehouse.versions import numerics_versions

ENTRY = "assay.ops.apply:quantize"
FILES = {
    "ops/apply.py": '''
        """What joins a step to its op."""
        import math
        from torch import nn
        from assay.schemas.steps import Quantize, Prune
        from assay.ops.rounding import to_grid
        from assay.ops import pruning

        HALF = 0.5
        LIMIT, UNUSED = 8, 9

        def quantize(step: Quantize, weight):
            """Round."""
            from .packing import pack  # heavy
            return pack(_scaled(weight), LIMIT)

        def _scaled(weight):
            return to_grid(weight * HALF)

        def prune(step: Prune, weight):
            return pruning.drop(weight)
        ''',
    "ops/rounding.py": """
        from assay.ops.numbers import epsilon

        def to_grid(x):
            # a comment
            return x + epsilon()
        """,
    "ops/numbers.py": "def epsilon():\n    return 1e-8\n",
    "ops/packing.py": "import assay.ops.layout.bits as bits\n\ndef pack(x, limit):\n    return bits.shift(x, limit)\n",
    "ops/layout/bits.py": "from assay.ops import packing  # a cycle\n\ndef shift(x, n):\n    return x << n\n",
    "ops/pruning.py": "from assay.ops.scores import score\n\ndef drop(x):\n    return score(x)\n",
    "ops/scores.py": "def score(x):\n    return x\n",
    "ops/bystander.py": "x = 1\n",
    "schemas/spec.py": "class Spec:\n    pass\n\nclass Other:\n    pass\n",
    "schemas/steps.py": '''
        from typing import Literal
        from assay.schemas.spec import Spec, Other

        Format = Literal["int8", "int4"]

        class Quantize(Spec):
            """Round the weights."""
            format: Format = "int4"
            """The integers."""
            calibration: "Calibration | None" = None

        class Calibration(Spec):
            windows: int = 16

        class Prune(Other):
            layers: int
        ''',
}


def dedent(text: str) -> str:
    from textwrap import dedent as plain

    return plain(text)


@pytest.fixture
def repo(tmp_path: Path) -> Codebase:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return Codebase(tmp_path)


def edit(repo: Codebase, name: str, old: str, new: str) -> None:
    path = repo.root / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("ops/rounding.py", "# a comment", "# another comment"),
        ("ops/rounding.py", "return x + epsilon()", "return (\n        x\n        + epsilon()\n    )"),
        ("ops/apply.py", '"""Round."""', '"""Round to the nearest."""'),
        ("ops/apply.py", '"""Round."""', ""),
        ("ops/apply.py", '"""What joins a step to its op."""', '"""Joins."""'),
        ("ops/apply.py", "# heavy", ""),
        ("schemas/steps.py", '"""The integers."""', '"""The whole numbers."""'),
        (
            "schemas/steps.py",
            "from typing import Literal\nfrom assay.schemas.spec import Spec, Other",
            "from assay.schemas.spec import Other, Spec\nfrom typing import Literal",
        ),
        ("ops/numbers.py", "def epsilon", "\n\n\ndef epsilon"),
    ],
)
def test_comments_docstrings_and_layout_change_nothing(repo, name, old, new):
    before = repo.fingerprint(ENTRY)
    edit(repo, name, old, new)
    assert repo.fingerprint(ENTRY) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("ops/numbers.py", "1e-8", "1e-6"),  # a helper of a helper
        ("ops/layout/bits.py", "x << n", "x >> n"),  # imported inside a function, by a relative import, and then by `import … as`
        ("ops/apply.py", "HALF = 0.5", "HALF = 0.25"),  # a constant of a private helper
        ("ops/apply.py", "LIMIT, UNUSED = 8, 9", "LIMIT, UNUSED = 4, 9"),
        ("ops/apply.py", "weight * HALF", "HALF * weight"),
        ("ops/apply.py", "import to_grid", "import to_grid as to_grid_"),  # then the name is another
        ("schemas/steps.py", "windows: int = 16", "windows: int = 32"),  # a default of a class named in a quoted annotation
        ("schemas/steps.py", '"int8", "int4"', '"int4", "int8"'),
        ("schemas/spec.py", "class Spec:\n    pass", "class Spec:\n    frozen = True"),
        ("ops/packing.py", "def pack(x, limit)", "def pack(x, limit=1)"),
        ("ops/numbers.py", "1e-8", "10e-9 if True else 0"),
        ("ops/numbers.py", "def epsilon", "@cached\ndef epsilon"),
    ],
)
def test_a_change_in_what_is_reached_changes_it(repo, name, old, new):
    before = repo.fingerprint(ENTRY)
    edit(repo, name, old, new)
    assert repo.fingerprint(ENTRY) != before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("ops/apply.py", "return pruning.drop(weight)", "return pruning.drop(weight) + 1"),  # another function of the entry's module
        ("ops/pruning.py", "return score(x)", "return -score(x)"),  # imported by that module, used by the other function alone
        ("ops/scores.py", "return x", "return x * x"),
        ("ops/apply.py", "import math", "import math, cmath"),
        ("schemas/steps.py", "layers: int", "layers: int = 4"),  # another step's declaration
        ("schemas/spec.py", "class Other:\n    pass", "class Other:\n    x = 1"),
        ("ops/bystander.py", "x = 1", "x = 2"),
    ],
)
def test_a_change_elsewhere_changes_nothing(repo, name, old, new):
    before = repo.fingerprint(ENTRY), repo.fingerprint("assay.ops.apply")
    edit(repo, name, old, new)
    assert repo.fingerprint(ENTRY) == before[0]
    assert (repo.fingerprint("assay.ops.apply") == before[1]) is (name == "ops/bystander.py")  # the whole module does depend on it


def test_a_new_kind_of_step_changes_nothing_of_the_old(repo):
    before = repo.fingerprint(ENTRY)
    edit(repo, "schemas/steps.py", "class Prune", "class Smooth(Spec):\n    alpha: int = 5\n\nclass Prune")
    assert repo.fingerprint(ENTRY) == before


def test_the_closure_can_be_read(repo):
    assert repo.closure(ENTRY) == [
        ("assay.ops.apply", ("HALF", "LIMIT", "UNUSED", "_scaled", "quantize")),
        ("assay.ops.layout.bits", ("*",)),
        ("assay.ops.numbers", ("*",)),
        ("assay.ops.packing", ("*",)),
        ("assay.ops.rounding", ("*",)),
        ("assay.schemas.spec", ("Spec",)),
        ("assay.schemas.steps", ("Calibration", "Format", "Quantize")),
    ]
    assert [name for name, _ in repo.closure("assay.ops.apply:prune")] == [
        "assay.ops.apply", "assay.ops.pruning", "assay.ops.scores", "assay.schemas.spec", "assay.schemas.steps",
    ]  # fmt: skip
    assert ("assay.ops.apply", ("*",)) in repo.closure("assay.ops.apply")


def test_different_entries_of_equal_code_differ_and_do_not_depend_on_the_place(repo, tmp_path_factory):
    assert repo.fingerprint(ENTRY) != repo.fingerprint("assay.ops.apply:prune")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name, text in FILES.items():
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text(dedent(text))
    assert Codebase(elsewhere).fingerprint(ENTRY) == repo.fingerprint(ENTRY)


def write(repo: Codebase, name: str, text: str) -> None:
    path = repo.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))


@pytest.mark.parametrize(
    "form",
    [
        "from assay.ops.numbers import epsilon\ndef f(): return epsilon()",
        "from assay.ops import numbers\ndef f(): return numbers.epsilon()",
        "from . import numbers\ndef f(): return numbers.epsilon()",
        "from .numbers import epsilon as e\ndef f(): return e()",
        "from ..ops.numbers import epsilon\ndef f(): return epsilon()",
        "import assay.ops.numbers\ndef f(): return assay.ops.numbers.epsilon()",
        "import assay.ops.numbers as n\ndef f(): return n.epsilon()",
        "from assay import ops\ndef f():\n    import assay.ops.numbers\n    return ops.numbers.epsilon()",
        "from assay.ops.numbers import *\ndef f(): return epsilon()",
        "import importlib\ndef f(): return importlib.import_module('assay.ops.numbers').epsilon()",
        "try:\n    from assay.ops.numbers import epsilon\nexcept ImportError:\n    epsilon = None\ndef f(): return epsilon()",
        "class A:\n    def g(self):\n        from assay.ops.numbers import epsilon\n        return epsilon()\nclass B(A): pass\nf = B",
        "from assay.ops.numbers import epsilon\ng = epsilon\ndef h(): return g()\nf = lambda: h()",
        "from assay.ops.numbers import epsilon\nTABLE = {}\nTABLE['x'] = epsilon\ndef f(): return TABLE['x']()",
        "from assay.ops.numbers import epsilon\nTABLE = {}\nif True:\n    name = 'x'\n    TABLE[name] = epsilon\ndef f(): return TABLE['x']()",
        "from assay.ops.numbers import epsilon\nTABLE = {}\nif True:\n    name = 'x'\n    TABLE.update(x=epsilon)\ndef f(): return TABLE['x']()",
        "from assay.ops.numbers import epsilon\nTABLE = {}\ndef register(g): TABLE[g.__name__] = g; return g\n@register\ndef hidden(): return epsilon()\ndef f(): return TABLE['hidden']()",
        "from assay.ops.numbers import epsilon\nstate = 0\ndef f(): return state\ndef set_state():\n    global state\n    state = epsilon()",
    ],
)
def test_every_form_of_import_and_use_is_followed(repo, form):
    write(repo, "ops/forms.py", form)
    before = repo.fingerprint("assay.ops.forms:f")
    assert ("assay.ops.numbers", ("*",)) in repo.closure("assay.ops.forms:f")
    edit(repo, "ops/numbers.py", "1e-8", "1e-7")
    assert repo.fingerprint("assay.ops.forms:f") != before


def test_what_only_a_type_checker_reads_does_not_count(repo):
    write(
        repo,
        "ops/typed.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from assay.ops.numbers import epsilon\ndef f(x: 'epsilon'): return x\n",
    )
    assert repo.closure("assay.ops.typed") == [("assay.ops.typed", ("*",))]


def test_an_init_file_runs_with_its_submodules_and_counts(repo):
    write(repo, "ops/layout/__init__.py", "order = 1\n")
    before = repo.fingerprint(ENTRY)
    edit(repo, "ops/layout/__init__.py", "order = 1", "order = 2")
    assert repo.fingerprint(ENTRY) != before


def test_listed_files_that_are_not_python_count_and_others_do_not(repo):
    write(repo, "ops/packing.py", "FINGERPRINT_FILES = ('pack.cpp',)\ndef pack(x, limit):\n    return x\n")
    write(repo, "ops/pack.cpp", "int x;")
    write(repo, "ops/other.cpp", "int y;")
    before = repo.fingerprint(ENTRY)
    edit(repo, "ops/other.cpp", "int y", "int z")
    assert repo.fingerprint(ENTRY) == before
    edit(repo, "ops/pack.cpp", "int x", "long x")
    assert repo.fingerprint(ENTRY) != before


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("assay.ops.nothing", r"there is no ops/nothing\.py"),
        ("assay.ops.apply:quantise", r"no top-level name 'quantise'; it has .*quantize"),
        ("assay.ops", r"is a folder"),
        ("torch.nn", r"expected one of assay"),
        ("assay.../etc", r"expected one of assay"),
        ("assay.ops.dangling", r"assay\.ops\.dangling needs the module assay\.ops\.gone"),
        ("assay.ops.misnamed:f", r"imports 'gone' from assay\.ops, a folder"),
        ("assay.ops.broken", r"does not parse"),
        ("assay.ops.lists", r"lists 'gone\.cpp', which is not a file"),
        ("assay.ops.leaves", r"lists '\.\./\.\./x', which is not a file of this repository"),
    ],
)
def test_what_is_not_there_is_a_clear_error(repo, entry, message):
    write(repo, "ops/dangling.py", "from assay.ops.gone import x\n")
    write(repo, "ops/misnamed.py", "def f():\n    from assay.ops import gone\n")
    write(repo, "ops/broken.py", "def f(:\n")
    write(repo, "ops/lists.py", "FINGERPRINT_FILES = ('gone.cpp',)\n")
    write(repo, "ops/leaves.py", "FINGERPRINT_FILES = ('../../x',)\n")
    with pytest.raises(FingerprintError, match=message):
        repo.fingerprint(entry)


def test_nothing_is_imported(repo):
    write(repo, "ops/explodes.py", "raise SystemExit('imported')\n")
    assert len(repo.fingerprint("assay.ops.explodes")) == 64


def test_the_code_of_a_step_is_read_once():
    entries = [
        f"assay.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}" for path in sorted((ROOT / "ops").rglob("*.py"))
    ]
    largest = max(entries, key=lambda entry: len(closure(entry)))
    assert len(closure(largest)) > 10
    warm = Codebase(ROOT)
    cold = seconds_of(lambda: warm.fingerprint(largest))
    prints = {entry: warm.fingerprint(entry) for entry in entries}
    assert seconds_of(lambda: [warm.fingerprint(entry) for entry in entries]) < cold / 2
    assert len(set(prints.values())) == len(entries)


def seconds_of(work) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def test_this_repository_is_the_one_that_is_read():
    assert closure("assay.warehouse.locks:try_hold") == [("assay.warehouse.locks", ("_lock", "_release", "try_hold"))]
    assert fingerprint("assay.warehouse.locks:try_hold") == Codebase(ROOT).fingerprint("assay.warehouse.locks:try_hold")


def test_versions_are_read_from_metadata_and_a_missing_library_is_named():
    assert numerics_versions("numpy") == {"numpy": version("numpy"), "torch": version("torch"), "transformers": version("transformers")}
    with pytest.raises(LookupError, match="pip install no-such-distribution"):
        numerics_versions("no-such-distribution")
