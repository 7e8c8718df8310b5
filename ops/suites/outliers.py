"""The suite ``outliers``: how far activations of a model stand out on a text. Not here: what counts as an outlier (``ops/quantize/statistics.py``)."""

import math
from pathlib import Path
from typing import Any

from assay.ops.suites.subject import Result, Subject, metric, model_of, tokenizer_of
from assay.schemas.protocols import Outliers


def outliers(protocol: Outliers, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Massive and largest activations of the residual stream before each block, the cosine of what enters a block and what leaves it, and outlier channels
    of what the linear layers read.

    ``massive_activations`` counts each in each block that it enters and in each window. The largest of all is told with its block, window, position
    (from 0; a BOS that the tokenizer adds is 0) and channel; without a slice its sigmas are its own, not the largest ones. Without a cache, so a KV format
    is not used, and neither is a draft.

    Raises:
        ValueError: the text is too short.
    """
    import torch

    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import calibration_windows
    from assay.ops.evaluate.plots import layer_curve_png
    from assay.ops.evaluate.windows import bos_of
    from assay.ops.models.checkpoint import weights_path
    from assay.ops.prune.depth import block_influence
    from assay.ops.quantize.statistics import largest_inputs, outlier_channels, residual_stream

    model, tokenizer = model_of(subject.checkpoint, protocol.dtype), tokenizer_of(subject.checkpoint)
    text = documents(**protocol.text.model_dump(), directory=experiment_dir)
    windows, bos = calibration_windows(tokenizer, text, protocol.windows, protocol.length), bos_of(tokenizer, "tokenizer")
    if bos is not None:
        windows = torch.cat([torch.full((len(windows), 1), bos), windows], dim=1)
    stream = residual_stream(model, windows)
    cosines = (1 - block_influence(model, windows)).tolist()
    inputs = {name: outlier_channels(largest) for name, largest in largest_inputs(model, windows).items()}

    tokens, path = windows.numel(), weights_path(subject.checkpoint)
    top = max(stream, key=lambda name: abs(stream[name].largest.value))
    worst = max(inputs, key=lambda name: inputs[name].worst)
    largest, ratio = stream[top].largest, inputs[worst].worst
    place = f"{largest.value:.4g} before {top}, window {stream[top].window}, token {largest.token}, channel {largest.channel}"
    metrics = [
        metric("massive_activations", sum(each.massive for each in stream.values()), "activation", tokens, path=path),
        metric("largest_activation", abs(largest.value), "1", tokens, path=path, message=place),
        metric("largest_activation_sigmas", largest.sigmas, "1", tokens, path=path, message=place),
        metric("outlier_layers_share", sum(bool(each.channels) for each in inputs.values()) / len(inputs), "1", len(inputs), path=path),
        metric("block_cosine", sum(cosines) / len(cosines), "1", tokens, path=path),
        metric("worst_channel_ratio", ratio if math.isfinite(ratio) else None, "1", len(inputs), path=path, message=worst),
    ]
    for (name, each), cosine in zip(stream.items(), cosines, strict=True):
        more: dict[str, Any] = {"path": path, "slice_kind": "layer", "slice": name}
        metrics += [
            metric("massive_activations", each.massive, "activation", tokens, **more),
            metric("largest_activation", abs(each.largest.value), "1", tokens, **more),
            metric("largest_activation_sigmas", each.largest.sigmas, "1", tokens, **more),
            metric("block_cosine", cosine, "1", tokens, **more),
        ]
    curve = layer_curve_png([abs(each.largest.value) for each in stream.values()], label="largest |x| entering the block", logarithmic=True)
    notes = {
        "windows": len(windows), "bos": bos, "bounds": "massive: above 100 and 1,000 medians of its window; outlier channel: above 6",
        "outlier_channels": {name: len(each.channels) for name, each in inputs.items() if each.channels},
    }  # fmt: skip
    return Result(metrics, [], {"largest_activation": curve}, notes)
