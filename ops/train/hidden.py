"""The distance of a student's hidden states from its teacher's, block by block, with a learned map where their widths differ.

Not here: how states are collected (``passes.py``), or the losses over the vocabulary (``losses.py``).
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from assay.ops.train.batches import generator

Pairs = Sequence[tuple[int, int]]
"""(student's block, teacher's block), numbered from 0: the states after the one are to be those after the other."""


def paired_blocks(kept: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Each block that a depth-pruned student kept with the block that it was in the teacher.

    Args:
        kept: the teacher's block numbers, in the student's order.
    Raises:
        ValueError: not in rising order.
    """
    if list(kept) != sorted(set(kept)):
        raise ValueError(f"kept blocks {list(kept)}; the numbers that are left of the teacher's blocks were expected, each once and rising")
    return tuple(enumerate(kept))


def maps_between(student_width: int, teacher_width: int, pairs: Pairs, *, seed: int = 0) -> nn.ModuleList:
    """A linear map from student to teacher for each pair, orthogonal to begin with; none where the widths are equal."""
    maps = nn.ModuleList()
    if student_width == teacher_width:
        return maps
    for number, _ in enumerate(pairs):
        linear = nn.Linear(student_width, teacher_width, bias=False)
        nn.init.orthogonal_(linear.weight, generator=generator(seed, "map", number))
        maps.append(linear)
    return maps


def hidden_sum(
    student: Mapping[int, Float[Tensor, "rows length student_width"]],
    teacher: Mapping[int, Float[Tensor, "rows length teacher_width"]],
    pairs: Pairs,
    maps: nn.ModuleList,
    counted: Bool[Tensor, "rows length"],
) -> Float[Tensor, ""]:
    """The sum over counted positions of the mean, over pairs and over the width, of (ŝ − t̂)²; at most 4 a position.

    A state is divided by its own root mean square first: the residual stream grows from block to block and has a few huge channels, so that plain
    squares would be those of the last pair and of these channels alone.

    Source:
        Muralidharan et al. 2024 (Minitron), §3.2, arXiv:2407.14679, with this normalisation in place of a weight for each pair.
    """
    total = torch.zeros((), device=counted.device)
    for number, (own, other) in enumerate(pairs):
        states = student[own][counted].float()
        mapped = maps[number](states) if len(maps) else states
        total = total + (_unit(mapped) - _unit(teacher[other][counted].float())).square().mean(dim=-1).sum()
    return total / len(pairs)


def _unit(states: Tensor) -> Tensor:
    return states * (states.square().mean(dim=-1, keepdim=True) + 1e-8).rsqrt()
