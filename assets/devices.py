"""What devices can do: the constants of this one, measured as an asset and kept as facts; those of others, from their datasheets.

Not here: measuring (``ops/cost/device.py``), or what is predicted from it (``assets/advise.py``).
"""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import dagster as dg
import yaml

from assay.assets.labels import POOL_TIMING
from assay.assets.registry import HERE
from assay.assets.steps import RETRY, step
from assay.assets.workspace import Workspace
from assay.schemas.devices import Datasheet, ModelShape
from assay.schemas.experiment import Resources
from assay.schemas.facts import DeviceConstant
from assay.warehouse.devices import device_row

CONSTANTS_KEY = dg.AssetKey(["device", "constants"])
HERE_NAME = "here"  # the device that `assay` runs on


class Machine(NamedTuple):
    """What a prediction knows of a device. Rates are FLOPs a second by dtype, bandwidths (bytes of a reading, bytes a second)."""

    name: str
    source: str  # measured, measured while others used the CPU, or the datasheet's name
    memory_bytes: float
    bandwidths: tuple[tuple[float, float], ...]
    rates: dict[str, float]
    launch_seconds: float = 0.0

    def bandwidth(self, size_bytes: float) -> float:
        """Of a reading of about ``size_bytes``: that of the nearest size."""
        return min(self.bandwidths, key=lambda known: abs(math.log(known[0] / max(size_bytes, 1.0))))[1]

    def rate(self, dtype: str) -> tuple[str, float]:
        """The dtype that arithmetic asked for in ``dtype`` runs in here, and its rate: bfloat16, or else float32, where the device has no such units."""
        found = next((each for each in (dtype, "bfloat16", "float32") if each in self.rates), None)
        if found is None:
            raise ValueError(
                f"{self.name} has no rate for {dtype}; it has {', '.join(self.rates) or 'none'}. `assay device --measure` measures"
            )
        return found, self.rates[found]


def datasheets() -> dict[str, Datasheet]:
    """The devices of ``devices.yaml`` by name."""
    return {name: Datasheet.model_validate(entry) for name, entry in _file()["devices"].items()}


def model_shapes() -> dict[str, ModelShape]:
    """The published models of ``devices.yaml`` by name."""
    return {name: ModelShape.model_validate(entry) for name, entry in _file()["shapes"].items()}


def measured_constants(workspace: Workspace) -> list[DeviceConstant]:
    """The constants of this device that are among the facts, in the order in which they are measured."""
    from assay.warehouse.facts import read

    frame = read(workspace.facts.root, "device_constant")
    rows = [DeviceConstant.model_validate(row) for row in frame.drop("written_at", strict=False).to_dicts()]
    order = ("launch_overhead", "read_bandwidth", "copy_bandwidth", "matmul_rate")
    mine = [row for row in rows if row.device_digest == device_row().device_digest and row.source == "measured"]
    return sorted(mine, key=lambda row: (row.threads, order.index(row.constant), row.dtype, row.amount))


def measure_here(workspace: Workspace) -> list[DeviceConstant]:
    """Measure this device and append what it did. Nothing else of ours runs meanwhile (the lock of timings); takes about ten seconds."""
    with step(workspace.home, Resources(), timing=True):
        import torch

        from assay.ops.cost.device import measure_device
        from assay.ops.models.device import device

        found, threads, now = measure_device(device=str(device())), torch.get_num_threads(), datetime.now(UTC)
    row = device_row()
    rows = [DeviceConstant(device_digest=row.device_digest, threads=threads, measured_at=now, **each._asdict()) for each in found]
    if not workspace.facts.exists("device", row.device_digest):
        workspace.facts.append("device", [row], name=row.device_digest)
    workspace.facts.append("device_constant", rows, name=f"{row.device_digest[:32]}-{threads}-{now:%Y%m%dT%H%M%S}")
    return rows


def machine_here(rows: Sequence[DeviceConstant]) -> Machine:
    """This device by its measured constants: of the most threads, quiet ones where there are some.

    Raises:
        ValueError: there is none.
    """
    if not rows:
        raise ValueError("this device has not been measured; `assay device` measures it in about ten seconds, or name one: --device h200")
    threads = max(row.threads for row in rows)
    rows = [row for row in rows if row.threads == threads]
    quiet = {(row.constant, row.dtype) for row in rows if row.status == "ok"}
    rows = [row for row in rows if row.status == "ok" or (row.constant, row.dtype) not in quiet]
    device = device_row()
    rates: dict[str, float] = {}
    for row in rows:
        if row.constant == "matmul_rate":
            rates[row.dtype] = max(row.value, rates.get(row.dtype, 0.0))
    source = "measured" if all(row.status == "ok" for row in rows) else "measured while others used the CPU"
    launch = next((row.value for row in rows if row.constant == "launch_overhead"), 0.0)
    reads = tuple((row.amount, row.value) for row in rows if row.constant == "read_bandwidth")
    return Machine(device.name, source, device.memory_bytes, reads, rates, launch)


def machine_of(sheet: Datasheet) -> Machine:
    """A device by its datasheet: peaks, which no program reaches."""
    rates = {dtype: rate * 1e12 for dtype, rate in sheet.tflop_s.items()}
    return Machine(sheet.name, f"datasheet: {sheet.source}", sheet.memory_gb * 1e9, ((1.0, sheet.bandwidth_gb_s * 1e9),), rates)


def machine(workspace: Workspace, name: str) -> Machine:
    """The device of that name: ``here``, or one of ``devices.yaml``.

    Raises:
        ValueError: there is none, or this one has not been measured.
    """
    if name == HERE_NAME:
        return machine_here(measured_constants(workspace))
    sheets = datasheets()
    if name not in sheets:
        raise ValueError(f"no device is called {name!r}; there are {HERE_NAME} (this one, measured) and {', '.join(sheets)}")
    return machine_of(sheets[name])


def build_devices(workspace: Workspace) -> Iterator[dg.AssetsDefinition]:
    """The asset of this device's constants."""

    @dg.asset(
        key=CONSTANTS_KEY,
        group_name="devices",
        kinds={"pytorch"},
        tags={"stage": "timing"},
        pool=POOL_TIMING,
        description="What this device does when it does one thing: reads, copies, multiplies, starts. The view roofline predicts from it.",
        retry_policy=RETRY,
    )
    def device_constants():
        rows = measure_here(workspace)
        table = "\n".join(
            f"| {each.constant} | {each.dtype} | {each.size} | {each.value:.4g} {each.unit} | {each.status} |" for each in rows
        )
        return dg.MaterializeResult(
            metadata={
                "device": device_row().name,
                "constants": dg.MetadataValue.md("| constant | dtype | size | value | status |\n|---|---|---|---:|---|\n" + table),
            }
        )

    yield device_constants


def _file() -> dict[str, dict[str, dict]]:
    return yaml.safe_load((HERE / "devices.yaml").read_text(encoding="utf-8"))
