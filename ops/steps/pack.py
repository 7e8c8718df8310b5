"""The step ``pack``: 2:4 weights stored as what is left of them and where it was. Not here: any arithmetic, or pruning."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.schemas.pruning import Pack

if TYPE_CHECKING:
    from torch import Tensor


def pack(step: Pack, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Every weight of the blocks, in the dtype that it is stored in, bit for bit.

    Raises:
        ValueError: the parent is quantized, or a weight is not 2:4 (a note names it).
    """
    from assay.ops.models.dense import check_finite, load_dense, require_dense
    from assay.ops.models.experts import weights
    from assay.ops.quantize.grid import naming
    from assay.ops.quantize.semi_structured import SemiStructured
    from assay.ops.quantize.semi_structured import pack as packed
    from assay.ops.quantize.write import save_packed

    require_dense(parent, step.kind)
    model = load_dense(parent)
    check_finite(model.state_dict().items())
    layers: dict[str, SemiStructured] = {}
    for name, weight in weights(model).items():
        with naming(name, weight):
            layers[name] = packed(weight)
    return {"pattern": step.pattern, **save_packed(model, parent, out, layers)}
