"""The suite ``heads``: what each attention head does. Not here: the prompts and scores (``ops/evaluate/head_screen.py``)."""

from pathlib import Path
from typing import Any

from assay.ops.suites.subject import Result, Subject, metric, model_of, tokenizer_of
from assay.schemas.protocols import Heads

LEAST = {"retrieval": 0.1, "induction": 0.3, "sink": 0.5}  # from which a head is counted; the first is Wu et al.'s, the others are ours


def heads(protocol: Heads, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """The three scores of every head (slice ``block.head``, both from 0), how many heads reach a score, and a picture of each score.

    Without a cache, so a KV format is not used, and neither is a draft.
    """
    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import calibration_windows
    from assay.ops.evaluate.head_screen import screen
    from assay.ops.evaluate.plots import heat_map_png
    from assay.ops.models.checkpoint import weights_path

    model, tokenizer = model_of(subject.checkpoint, protocol.dtype), tokenizer_of(subject.checkpoint)
    text = documents(**protocol.text.model_dump(), directory=experiment_dir)
    found = screen(model, tokenizer, calibration_windows(tokenizer, text, protocol.windows, protocol.length), seed=protocol.seed)
    path, metrics, pictures = weights_path(subject.checkpoint), [], {}
    for name, scores in found.items():
        told: dict[str, Any] = {"path": path}
        metrics.append(metric(f"{name}_heads", int((scores >= LEAST[name]).sum()), "head", scores.numel(), **told))
        metrics.append(metric(name, float(scores.mean()), "1", scores.numel(), **told))
        for layer, row in enumerate(scores.tolist()):
            metrics += [metric(name, value, "1", 1, slice_kind="head", slice=f"{layer}.{head}", **told) for head, value in enumerate(row)]
        by_head = {f"head {head}": column for head, column in enumerate(scores.T.tolist())}
        pictures[name] = heat_map_png(by_head, label=f"{name}: share")
    return Result(metrics, [], pictures, {"least": LEAST})
