"""What rounding did to each layer, written beside a packed checkpoint and read by the suite ``layers``. Not here: the numbers themselves (``statistics.py``)."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from assay.ops.quantize.grid import Quantized
from assay.ops.quantize.layout import Packed, stored_bytes
from assay.ops.quantize.statistics import clipped_share, largest_sigmas, snr_db

FILE = "layers.json"


def harm(weight: Float[Tensor, "rows cols"], rounded: Packed, output_error: float | None = None) -> dict[str, Any]:
    """One layer: its form and bits per weight, SNR in dB (None if nothing changed), clipped share, largest weight in root mean squares.

    Args:
        output_error: ‖X (w - ŵ)ᵀ‖² / ‖X wᵀ‖² on calibration inputs, where that is known.
    """
    snr = snr_db(weight, rounded.dense())
    found: dict[str, Any] = {
        **size(rounded),
        "snr_db": _short(snr) if math.isfinite(snr) else None,
        "largest_sigmas": _short(largest_sigmas(weight)),
    }
    if isinstance(rounded, Quantized):
        found["clipped_share"] = _short(clipped_share(weight, rounded))
    if output_error is not None:
        found["output_error"] = _short(output_error)
    return found


def size(packed: Packed) -> dict[str, Any]:
    """The form of one layer and its bits per weight as it is stored: what another way to store the same codes changes."""
    rows, cols = packed.shape
    return {"form": packed.form, "bits": _short(8 * stored_bytes(packed) / (rows * cols))}


def write(directory: Path, layers: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep what :func:`harm` said of each layer in ``directory``."""
    (Path(directory) / FILE).write_text(json.dumps(layers, indent=1) + "\n")


def read(directory: Path) -> dict[str, dict[str, Any]]:
    """What :func:`write` kept, in the order of the layers; nothing where there is no such file."""
    path = Path(directory) / FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def _short(number: float) -> float:
    """Six digits: more would differ from machine to machine."""
    return float(f"{number:.6g}")
