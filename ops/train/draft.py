"""DistillSpec: a draft is trained toward the target it will speculate for, on text and on its own samples.

It is recovery (``recover.py``) with a target in the base's place; here are its terms, and what a pair of tokenizers has to have in common.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from assay.ops.data.tokens import vocabulary_digest
from assay.ops.train.loop import Point, Progress, Settings
from assay.ops.train.losses import DivergenceName
from assay.ops.train.on_policy import OnPolicy, Sample
from assay.ops.train.recover import Objective, recover


def distill(
    student: Any,
    teacher: Any,
    windows: Int64[Tensor, "windows length"],
    held_out: Int64[Tensor, "held_out held_length"],
    *,
    loss: DivergenceName = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    on_policy_pct: int = 0,
    rows: int = 8,
    settings: Settings,
    vocabulary: int | None = None,
    eos_ids: Collection[int] = frozenset(),
    sample: Sample | None = None,
    prefix: int | None = None,
    state: Path | None = None,
    run: dict[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Point]:
    """Train ``student``, in place, so that its next-token distributions come close to ``teacher``'s: see :func:`recover`.

    Args:
        loss, beta, temperature: see ``recover.Objective``.
        on_policy_pct, prefix, eos_ids, sample: see ``on_policy.OnPolicy``.
    Source:
        Zhou et al. 2023, arXiv:2310.08461. Unlike it the loss is taken at the prompt's positions too: a draft proposes there as well once
        a conversation goes on.
    """
    return recover(
        student,
        teacher,
        windows,
        held_out,
        objective=Objective(loss, beta=beta, temperature=temperature),
        on_policy=OnPolicy(on_policy_pct, prefix, eos_ids, sample),
        rows=rows,
        settings=settings,
        vocabulary=vocabulary,
        state=state,
        run=run,
        progress=progress,
    )


def require_same_tokens(teacher: Any, student: Any) -> None:
    """Refuse tokenizers that give ids another meaning; the same tokens with heads of another padded width are fine.

    Raises:
        ValueError: the token lists differ.
    """
    if vocabulary_digest(teacher) != vocabulary_digest(student):
        raise ValueError(
            f"the draft's tokenizer ({len(student):,} tokens) has other tokens than the target's ({len(teacher):,}), so their distributions cannot be "
            "compared; a variant of the target, or a sibling with its tokenizer, was expected"
        )


def eos_of(model: Any) -> frozenset[int]:
    """All ids that end a text, by the generation config of ``model``."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or ())
