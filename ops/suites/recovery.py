"""The suite ``recovery``: the curve of the training run that made a checkpoint. Not here: training (``ops/train``)."""

import json
import math
from pathlib import Path
from typing import Any

from assay.ops.steps.training import CURVE
from assay.ops.suites.subject import Result, Subject, metric
from assay.schemas.protocols import Recovery

NAMES = {
    "kl_nats": ("student_kl_nats", "nat"), "top1_agreement": ("student_top1_agreement", "1"), "log_perplexity": ("student_log_perplexity", "nat"),
    "base_log_perplexity": ("teacher_log_perplexity", "nat"),
}  # fmt: skip
OF_A_DOMAIN = {
    "log_perplexity_domain_": ("student_log_perplexity", "nat"), "base_log_perplexity_domain_": ("teacher_log_perplexity", "nat"),
    "weight_domain_": ("domain_weight", "1"),
}  # before the domain's number  # fmt: skip


def recovery(protocol: Recovery, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """What the student was at the end and after so many tokens (slice ``tokens``), on text that it was not trained on; no model is run.

    Of a run that read several domains also by domain (slices ``domain``, and ``domain_tokens`` as domain/tokens), and the share of the rows that each had
    from then on. The teacher is the base; of learned masks, the model before them.

    ``regained_share`` is the part of the gap in log perplexity between student and base that training closed: 0 nothing, 1 all. A run without a teacher has log perplexities alone.

    Raises:
        ValueError: the checkpoint has no curve.
    """
    from assay.ops.evaluate.plots import recovery_curve_png

    file = subject.checkpoint / CURVE
    if not file.is_file():
        raise ValueError(f"{subject.checkpoint} has no {CURVE}; what a distill step writes has it")
    told = json.loads(file.read_text())
    curve, tokens = told["curve"], told["held_out_tokens"]
    first, last = curve[0]["metrics"], curve[-1]["metrics"]
    gap = first["log_perplexity"] - first.get("base_log_perplexity", math.inf)
    metrics = [metric(name, last[key], unit, tokens) for key, (name, unit) in NAMES.items() if key in last]
    if gap > 0:
        metrics.append(metric("regained_share", (first["log_perplexity"] - last["log_perplexity"]) / gap, "1", tokens))
    for point in curve:
        sliced: dict[str, Any] = {"slice_kind": "tokens", "slice": str(point["tokens"])}
        if point["loss"] is not None:
            metrics.append(metric("training_loss", point["loss"], "nat", point["tokens"], **sliced))
        metrics += [
            metric(NAMES[key][0], value, NAMES[key][1], tokens, **sliced) for key, value in point["metrics"].items() if key in NAMES
        ]
    for number, name in enumerate(told.get("domains", ())):
        metrics += [
            metric(called, point["metrics"][f"{key}{number}"], unit, tokens // len(told["domains"]), slice_kind=kind, slice=where)
            for key, (called, unit) in OF_A_DOMAIN.items()
            for point, kind, where in (
                *((each, "domain_tokens", f"{name}/{each['tokens']}") for each in curve if each["metrics"]),
                (curve[-1], "domain", name),
            )
        ]
    return Result(metrics, [], {"recovery": recovery_curve_png(curve)}, {"steps": told["steps"], "tokens": told["tokens"]})
