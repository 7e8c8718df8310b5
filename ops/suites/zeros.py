"""The suite ``zeros``: how many of the blocks' weights are zero, as the checkpoint gives them. Not here: counting (``ops/prune/masks.py``)."""

from pathlib import Path

from assay.ops.suites.subject import Result, Subject, metric, model_of
from assay.schemas.protocols import Zeros


def zeros(protocol: Zeros, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """The share of zeros over all and by layer, of quantized weights in what they stand for; and of a pattern, the layers that break it."""
    from assay.ops.models.checkpoint import weights_path
    from assay.ops.models.dense import PRUNED_KEY, read_config
    from assay.ops.models.experts import weights
    from assay.ops.prune.masks import Sparsity, realised

    said = read_config(subject.checkpoint).get(PRUNED_KEY) or {}
    pattern = Sparsity.of_pattern(said["pattern"]) if said.get("pattern") else None
    found, path = realised(weights(model_of(subject.checkpoint, "float32")), pattern), weights_path(subject.checkpoint)
    metrics = [metric("zero_share", found.share, "1", found.weights, path=path)]
    if pattern is not None:
        metrics.append(metric("broken_pattern_layers", len(found.broken), "layer", len(found.layers), path=path))
    metrics += [metric("zero_share", share, "1", 1, slice_kind="layer", slice=name, path=path) for name, share in found.layers.items()]
    return Result(metrics, [], {}, {"said": said})
