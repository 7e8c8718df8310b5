"""The step ``pack``: 2:4 weights, or their int8 codes, stored as what is left and where it was. Not here: any arithmetic, pruning, or rounding."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.schemas.pruning import Pack

if TYPE_CHECKING:
    from torch import Tensor


def pack(step: Pack, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Every weight of the blocks, in the dtype or as the codes that it is stored in, bit for bit; what else is packed stays as it is.

    Raises:
        ValueError: the parent is quantized to something else than int8, or a weight is not 2:4 (a note names it).
    """
    from assay.ops.models.checkpoint import load_model
    from assay.ops.models.dense import check_finite, read_config, require_dense
    from assay.ops.models.experts import weights
    from assay.ops.quantize import by_layer
    from assay.ops.quantize.grid import Quantized, naming
    from assay.ops.quantize.layout import Packed
    from assay.ops.quantize.read import read_weights
    from assay.ops.quantize.runtime import runtime_of
    from assay.ops.quantize.semi_structured import pack as packed
    from assay.ops.quantize.semi_structured import pack_codes
    from assay.ops.quantize.write import save_packed

    config = read_config(parent)
    if not config.get("quantization_config"):
        require_dense(parent, step.kind)
    rounded, model = read_weights(parent).packed, load_model(parent)
    check_finite(model.state_dict().items())
    layers: dict[str, Packed] = dict(rounded)
    for name, weight in weights(model).items():
        codes = rounded.get(name)
        with naming(name, weight):
            if codes is None:
                layers[name] = packed(weight)
            elif isinstance(codes, Quantized):
                layers[name] = pack_codes(codes)
            else:
                raise ValueError(
                    f"it is stored as {codes.form}, which is not packed as 2:4; weights of a float dtype and plain int8 codes are"
                )
    told = save_packed(model, parent, out, layers, runtime=runtime_of(config))
    if known := by_layer.read(parent):
        by_layer.write(out, {name: each | by_layer.size(layers[name]) for name, each in known.items()})
    return {"pattern": step.pattern, **told}
