"""What a run reads that may read several texts: their windows and which is of which. Not here: which of them a step takes (``ops/train/domains.py``)."""

from typing import TYPE_CHECKING, Any, NamedTuple

from assay.ops.steps.training import HELD_OUT_TOKENS, steps_of, texts_of
from assay.schemas.training import MixedTexts

if TYPE_CHECKING:
    from torch import Tensor

    from assay.ops.steps.training import Windows
    from assay.ops.train.domains import Domains


class Reading(NamedTuple):
    """Windows to read and windows held out, [windows, length], and which domain each is of; None where there is one text."""

    windows: "Tensor"
    held_out: "Tensor"
    domains: "Domains | None"


def reading_of(asked: MixedTexts, windows: "Windows") -> Reading:
    """The windows of the text; of domains, as many of each as its share of the rows is at first, and those behind them held out, as many of each.

    A domain that is read more than its share is read again from its first window.

    Args:
        windows: (text, windows, length) → token ids [windows, length].
    Raises:
        ValueError: a text has fewer tokens; a note says which domain it is and how much it was asked for.
    """
    if asked.domains is None:
        return Reading(*texts_of(asked, windows), None)
    import torch

    from assay.ops.train.domains import Domains

    rows, held = steps_of(asked) * asked.batch, HELD_OUT_TOKENS // asked.length // len(asked.domains) + 1
    parts = []
    for domain in asked.domains:
        count = -(-rows * domain.share_pct // 100)
        try:
            parts.append(windows(domain.text, count + held, asked.length).split([count, held]))
        except ValueError as error:
            error.add_note(
                f"the domain {domain.called} is to have {count:,} windows of {asked.length} tokens, {domain.share_pct} percent of the {rows:,} rows that "
                f"are read, and {held:,} that are held out; fewer tokens, a smaller share_pct, or a longer text would work"
            )
            raise
    read, held_out = (torch.cat(side) for side in zip(*parts, strict=True))
    of_read, of_held = (torch.cat([torch.full((len(part[side]),), number) for number, part in enumerate(parts)]) for side in (0, 1))
    return Reading(read, held_out, Domains(of_read, of_held, tuple(float(domain.share_pct) for domain in asked.domains)))


def told_of_domains(asked: MixedTexts) -> dict[str, Any]:
    """What the domains of the curve's metrics are called, by their number; nothing where there is one text."""
    return {} if asked.domains is None else {"domains": [domain.called for domain in asked.domains]}
