"""The package: what a wheel holds, that the lock fits what pyproject.toml asks for, and that our folder ``kernels`` cannot break transformers.

Not here: what the modules do.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FOLDERS = ("assets", "kernels", "ops", "schemas", "warehouse")


def tracked() -> list[Path]:
    """Paths of the files that git tracks and that are there, from the root; without git, every file below the folders."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]
    return [file.relative_to(ROOT) for folder in (*FOLDERS, "tests") for file in (ROOT / folder).rglob("*") if file.is_file()]


def run(code: str, *, cwd: Path, **environment: str) -> str:
    """What ``code`` prints in a Python of its own; its error is the test's error."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_folder_is_a_regular_package():
    """With an ``__init__.py`` a top-level ``kernels`` would be imported by transformers in place of Hugging Face's."""
    found = [file for folder in FOLDERS for file in (ROOT / folder).rglob("__init__.py")]
    assert not found, f"remove {', '.join(str(file.relative_to(ROOT)) for file in found)}: folders are parts of the namespace package assay"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel that is built from the tracked files alone, without a network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for file in tracked():
        (source / file.parent).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, source / file)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        target,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("assay-*.whl")
    return zipfile.ZipFile(built).namelist()


def test_every_tracked_file_of_the_folders_is_in_the_wheel(wheel):
    """An explicit list of packages loses nested folders from the wheel while the editable install still sees them."""
    ours = [file for file in tracked() if file.parts[0] in FOLDERS or file == Path("definitions.py")]
    missing = sorted({f"assay/{file.as_posix()}" for file in ours} - set(wheel))
    assert not missing, f"not in the wheel; package-data in pyproject.toml says which endings are: {', '.join(missing)}"


def test_the_wheel_holds_no_tests_and_installs_nothing_beside_the_package(wheel):
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"assay"}
    assert not [name for name in wheel if name.startswith(("assay/tests/", "assay/.", "assay/build/"))]


def test_the_command_assay_is_an_entry_point():
    from importlib.metadata import entry_points

    (command,) = entry_points(group="console_scripts", name="assay")
    assert command.value == "assay.definitions:main"


def test_the_lock_pins_every_package_that_pyproject_asks_for_at_a_version_that_fits():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = [line for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    unpinned = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+(; .+)?", line)]
    assert not unpinned, f"neither a pin nor free of build labels and addresses: {unpinned}"
    lock = dict(line.split(";")[0].split("==") for line in lines)
    for text in project["project"]["dependencies"] + project["dependency-groups"]["dev"] + project["build-system"]["requires"]:
        wanted = Requirement(text)
        version = lock.get(canonicalize_name(wanted.name))
        assert version and wanted.specifier.contains(version), f"pyproject.toml asks for {text}, requirements.lock has {version}; make lock"


def test_transformers_is_new_enough_to_pass_by_a_folder_named_kernels():
    """Releases before 5.18 stop at any importable directory ``kernels`` that has no distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (wanted,) = (Requirement(text) for text in project["project"]["dependencies"] if Requirement(text).name == "transformers")
    assert not wanted.specifier.contains("5.17.9") and wanted.specifier.contains("5.18.0")


# What transformers imports from a `kernels` that it takes for Hugging Face's: `name` has to exist, and to be something to call or subclass.
FAKE_KERNELS = """
class _Anything:
    def __init__(self, *args, **kwargs): pass
    def __class_getitem__(cls, item): return cls
    def __call__(self, *args, **kwargs): return args[0] if args else self

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Anything,), {})

REAL = True
"""

LOADS_A_MODEL = """
import sys
sys.path.insert(0, {root!r})
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.import_utils import is_kernels_available
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
model = AutoModelForCausalLM.from_config(config)
import torch
assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 32)
import kernels
print(is_kernels_available(), getattr(kernels, "REAL", False))
import assay.kernels
assert {folder!r} in assay.kernels.__path__, list(assay.kernels.__path__)
"""


def fake_distribution(directory: Path, version: str) -> Path:
    package, info = directory / "kernels", directory / f"kernels-{version}.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(FAKE_KERNELS, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n", encoding="utf-8")
    (info / "RECORD").write_text("kernels/__init__.py,,\n", encoding="utf-8")
    return directory


def test_transformers_loads_a_model_beside_hugging_face_s_kernels_with_this_repository_first_on_the_path(tmp_path):
    """GPU machines have that package (sglang requires it), and `dagster dev` and `python -m pytest` always put the repository on the path."""
    (ROOT / "kernels").mkdir(exist_ok=True)  # git keeps no empty folder
    distribution = fake_distribution(tmp_path / "site", "0.18.3")
    printed = run(LOADS_A_MODEL.format(root=str(ROOT), folder=str(ROOT / "kernels")), cwd=tmp_path, PYTHONPATH=str(distribution))
    assert printed.split() == ["True", "True"], "transformers did not take the fake package for Hugging Face's, so this proves nothing"


LOADS_THE_DEFINITIONS = """
import sys
import dagster
import assay.definitions as module
loaded = module.defs() if callable(module.defs) else module.defs
dagster.Definitions.validate_loadable(loaded)
print(len(list(loaded.resolve_all_asset_specs())), *sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_the_definitions_load_without_torch_and_transformers(tmp_path):
    """They are loaded for every step: 2 s without, 8 s with."""
    assets, *heavy = run(LOADS_THE_DEFINITIONS, cwd=tmp_path, ASSAY_HOME=str(tmp_path / "home")).split()
    assert int(assets) > 0
    assert not heavy, f"assay.definitions imports {' and '.join(heavy)}; move the import into the step"
