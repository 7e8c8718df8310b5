"""The step ``smooth``: scales of channels moved between layers, by one of two searches. Not here: any arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.schemas.rounding import Smooth

if TYPE_CHECKING:
    from torch import Tensor


def smooth(step: Smooth, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """SmoothQuant: by the largest inputs and weights of each channel."""
    from assay.ops.models.dense import move
    from assay.ops.quantize.smooth import smooth
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.whole import opened, written

    ids = require_windows(windows, f"{step.method} looks at text")
    model, stored = opened(parent, step.kind)
    found = smooth(model, ids, alpha=step.alpha_pct / 100)
    written(move(model, stored), parent, out)
    return {"method": step.method, "pairs": len(found), "largest_scale": max(float(scales.max()) for scales in found.values())}


def awq(step: Smooth, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """AWQ: by what errs least in the outputs when the weights are rounded."""
    from assay.ops.models.dense import move
    from assay.ops.quantize.awq import awq
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.quantize import format_of
    from assay.ops.steps.whole import opened, written

    ids = require_windows(windows, f"{step.method} looks at text")
    model, stored = opened(parent, step.kind)
    salience = "activation" if step.salience == "inputs" else "weight"
    found = awq(model, ids, format_of(step), salience=salience, duo="on" if step.duo_scaling else "off", clip=False)
    written(move(model, stored), parent, out)
    errors = {name: {"alpha": each.alpha, "error": each.error, "unscaled": each.unscaled} for name, each in found.pairs.items()}
    return {"method": step.method, "pairs": errors, "unseen": list(found.unseen)}
