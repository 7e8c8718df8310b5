"""The step ``prune_learned``: gates are trained until so much is left, and the rest is cut. Not here: any arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.ops.steps.domains import reading_of, told_of_domains
from assay.ops.steps.training import Running, settings_of, steps_of, told_of, with_curve
from assay.schemas.training import PruneLearned

if TYPE_CHECKING:
    from assay.ops.steps.training import Windows


def prune_learned(
    step: PruneLearned,
    parent: Path,
    out: Path,
    *,
    windows: "Windows",
    running: Running = Running(),  # noqa: B008
) -> dict[str, Any]:
    """Train gates and weights on the next token of the text, then write what the gates leave as a plain checkpoint.

    Args:
        windows: (text, windows, length) → token ids [windows, length].
    Returns:
        What was kept, the curve, and the shape before and after.
    Raises:
        ValueError: the parent is quantized or rotated online, more is to be left than there is, or training diverged.
    """
    from assay.ops.models import checkpoint, dense, structure
    from assay.ops.models.device import device
    from assay.ops.prune.depth import drop_layers
    from assay.ops.prune.width import Kept, cut, require_possible
    from assay.ops.steps.whole import opened, written
    from assay.ops.train.learned_masks import Target, learn_masks

    model, stored = opened(parent, step.kind)
    require_possible(model, kv_groups=step.kv_groups, query_heads=None, ffn=step.ffn, hidden=step.hidden)
    dense.move(model, device=device())
    read, held_out, domains = reading_of(step, windows)
    settings = settings_of(step, running.seed)._replace(stop_above=None)  # its loss has the multipliers in it, which rise
    before = structure.shape_numbers(model)
    found = learn_masks(
        model, read, held_out, Target(step.layers, step.kv_groups, step.ffn, step.hidden), settings=settings, gate_rate=step.gate_rate,
        target_warmup_steps=steps_of(step) * step.target_warmup_pct // 100, rows=step.batch, domains=domains,
        vocabulary=len(checkpoint.load_tokenizer(parent)), **running.followed,
    )  # fmt: skip
    kept = found.kept
    dense.move(model, device="cpu")
    if step.layers is not None and len(kept.layers) < before["layers"]:
        drop_layers(model, sorted(set(range(int(before["layers"]))) - set(kept.layers)))
    widths = Kept(
        kept.kv_groups if step.kv_groups is not None else None, None, kept.ffn if step.ffn is not None else None,
        kept.hidden if step.hidden is not None else None,
    )  # fmt: skip
    if any(each is not None for each in widths):
        cut(model, widths)
    after = structure.shape_numbers(model)
    written(dense.move(model, stored), parent, out)
    told = {"before": before, "after": after, "layers": kept.layers, **told_of_domains(step), **told_of(step, found.points, held_out)}
    return with_curve(out, told)
