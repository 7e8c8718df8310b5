"""Steps that remove weights: single ones, whole blocks, widths, experts. Not here: how any is done (``ops/prune``)."""

from typing import Literal

from pydantic import Field

from assay.schemas.spec import Spec
from assay.schemas.texts import Calibration


class PruneDepth(Spec):
    """Remove whole blocks: those of least Block Influence, or the contiguous run whose input and output are the closest in angle."""

    kind: Literal["prune_depth"] = "prune_depth"
    layers: int = Field(ge=1, le=1000, description="how many blocks to remove")
    score: Literal["block_influence", "angular"] = "block_influence"
    calibration: Calibration = Calibration()
