"""The suite ``layers``: what rounding did to each layer, as it was kept beside the packed weights. Not here: the numbers (``ops/quantize/by_layer.py``)."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from assay.ops.suites.subject import Result, Subject, metric
from assay.schemas.protocols import Layers

UNITS = {"snr_db": "dB", "clipped_share": "1", "largest_sigmas": "1", "bits": "bit", "output_error": "1"}


def layers(protocol: Layers, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Means over the layers, each layer's own numbers, and a picture of the signal over noise; no model is run, and exact but for what was shortened.

    ``quantized_bits`` without a slice is of all packed weights together. A layer in which nothing changed has no SNR and is left out of the mean.
    A draft changes no weight and is not used.

    Raises:
        ValueError: the checkpoint has no record of its layers.
    """
    from assay.ops.cost.bytes import artifact_bytes
    from assay.ops.evaluate.plots import heat_map_png
    from assay.ops.quantize.by_layer import FILE, read

    known = read(subject.checkpoint)
    if not known:
        raise ValueError(f"{subject.checkpoint} has no {FILE}, so nothing is known of its layers; what a quantize step writes has it")
    found = {name: {layer: each[name] for layer, each in known.items() if each.get(name) is not None} for name in UNITS}
    metrics = [
        _mean("snr_db", found),
        _one("snr_lowest_db", found["snr_db"], min, "dB"),
        _one("largest_sigmas", found["largest_sigmas"], max, "1"),
        metric("quantized_bits", artifact_bytes(subject.checkpoint).quantized_bits_per_weight, "bit", len(known)),
        *(_mean(name, found) for name in ("clipped_share", "output_error") if found[name]),
    ]
    for layer, told in known.items():
        for name in (name for name in UNITS if name in told):
            called = "quantized_bits" if name == "bits" else name
            message = "nothing changed" if told[name] is None else None
            metrics.append(metric(called, told[name], UNITS[name], 1, slice_kind="layer", slice=layer, message=message))
    rows = by_projection(found["snr_db"])
    pictures = {"snr": heat_map_png(rows, label="signal over noise (dB)")} if rows else {}
    return Result(metrics, [], pictures, {"layers": len(known), "forms": dict(Counter(each["form"] for each in known.values()))})


def by_projection(values: Mapping[str, float]) -> dict[str, list[float | None]]:
    """Values of layers by the last part of their names, one for each block from 0: of several, as experts are, the lowest; None where there is none."""
    found: dict[str, dict[int, float]] = {}
    for name, value in values.items():
        place = re.match(r"(?:.*?\.)??(\d+)\.", name)  # the first number is the block, a later one an expert
        if place is not None:
            row = found.setdefault(name.rpartition(".")[2], {})
            block = int(place[1])
            row[block] = min(value, row.get(block, value))
    blocks = 1 + max((block for row in found.values() for block in row), default=-1)
    return {name: [row.get(block) for block in range(blocks)] for name, row in found.items()}


def _mean(name: str, found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    values = list(found[name].values())
    return metric(name, fmean(values) if values else None, UNITS[name], len(values), message=None if values else "no layer changed")


def _one(name: str, values: Mapping[str, float], pick: Callable[..., str], unit: str) -> dict[str, Any]:
    """The least or the largest of the layers, and whose it is."""
    layer = pick(values, key=values.__getitem__) if values else None
    return metric(name, values[layer] if layer else None, unit, len(values), message=layer or "no layer changed")
