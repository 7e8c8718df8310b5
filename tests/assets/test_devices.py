"""Devices: this one is measured and kept as facts, others are what their datasheets say, and which is which is always told."""

import dagster as dg
import pytest

from assay.assets import devices
from assay.assets.devices import (
    CONSTANTS_KEY,
    datasheets,
    machine,
    machine_here,
    machine_of,
    measure_here,
    measured_constants,
    model_shapes,
)
from assay.assets.workspace import Workspace
from assay.definitions import build
from assay.ops.cost import device as measuring
from assay.ops.cost.roofline import ridge
from assay.ops.cost.shape import Decoder


@pytest.fixture
def quick(monkeypatch, tmp_path) -> Workspace:
    """A workspace in which measuring takes a moment."""
    real = measuring.measure_device
    monkeypatch.setattr(measuring, "measure_device", lambda **asked: real(**asked, sizes=(4096, 2**20), squares=(16,), seconds_each=0.002))
    return Workspace(tmp_path / "home", ())


def test_what_is_measured_is_kept_and_measured_again_replaces_it(quick):
    assert measured_constants(quick) == []
    first = measure_here(quick)
    assert len(measured_constants(quick)) == len(first) > 6
    again = {row.size: row.measured_at for row in measure_here(quick)}
    assert {row.size: row.measured_at for row in measured_constants(quick)} == again


def test_the_asset_measures_and_shows_the_constants(quick):
    defs = build([], quick)
    result = dg.materialize([defs.get_assets_def(CONSTANTS_KEY)])
    told = result.asset_materializations_for_node("device__constants")[0].metadata
    assert "read_bandwidth" in str(told["constants"].value) and measured_constants(quick)


def test_this_machine_is_told_as_measured_and_as_noisy_where_it_was(quick):
    rows = measure_here(quick)
    quiet = [row.model_copy(update={"status": "ok"}) for row in rows]
    assert machine_here(quiet).source == "measured"
    assert machine_here([row.model_copy(update={"status": "noisy"}) for row in rows]).source == "measured while others used the CPU"
    odd = quiet[-1].model_copy(update={"status": "noisy", "value": 1e30})
    assert odd.constant == "matmul_rate" and machine_here([*quiet, odd]).rates[odd.dtype] < 1e30
    mixed = [row if row.dtype == "bfloat16" else row.model_copy(update={"status": "noisy"}) for row in quiet]
    assert set(machine_here(mixed).rates) == set(machine_here(quiet).rates)  # a quiet rate of one dtype says nothing of another
    with pytest.raises(ValueError, match="has not been measured; `assay device` measures it"):
        machine_here([])


def test_the_bandwidth_is_that_of_the_nearest_size():
    found = devices.Machine("x", "measured", 1, ((1e6, 100.0), (1e9, 10.0)), {"float32": 1.0})
    assert [found.bandwidth(size) for size in (1, 1e7, 1e8, 1e12)] == [100.0, 100.0, 10.0, 10.0]
    assert found.rate("fp8_e4m3") == ("float32", 1.0)


def test_datasheets_give_the_published_ridges(tmp_path):
    known = {name: machine_of(sheet) for name, sheet in datasheets().items()}
    assert [round(ridge(known[name].rates["bfloat16"], known[name].bandwidth(1e9))) for name in ("h100", "h200")] == [295, 206]
    assert all("datasheet: " in each.source for each in known.values()) and known["a100"].rate("fp8_e4m3")[0] == "bfloat16"
    with pytest.raises(ValueError, match="no device is called 'h300'; there are here"):
        machine(Workspace(tmp_path, ()), "h300")


@pytest.mark.parametrize(("name", "billions"), [("70b", 70.55), ("8b", 8.03), ("15b", 15.6)])
def test_shapes_have_the_weights_that_their_names_say(name, billions):
    shape = model_shapes()[name]
    decoder = Decoder(
        shape.layers, shape.hidden_size, shape.intermediate_size, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size, shape.tied, shape.gated
    )  # fmt: skip
    assert decoder.parameters / 1e9 == pytest.approx(billions, rel=5e-3)
