"""Recovery: a compressed model is trained to speak as its base did, by what the base says, by the text, or by both.

Models and tensors in, the curve out. Not here: the losses (``losses.py``, ``hidden.py``), the loop (``loop.py``), what a teacher's cache is
(``teachers.py``), or low-rank adapters (``lora.py``), which are put in before and merged after.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from assay.ops.evaluate.divergence import Head, check_head, head_of
from assay.ops.train import passes
from assay.ops.train.batches import Batch, batch_of, digest, split
from assay.ops.train.domains import REFERENCE, Domains, identity, losses_of, reader, with_weights
from assay.ops.train.hidden import Pairs, hidden_sum, maps_between
from assay.ops.train.loop import Loss, Point, Progress, Settings, train
from assay.ops.train.losses import DivergenceName, cross_entropy_sum, distillation_sum, divergence, trainable_head
from assay.ops.train.on_policy import OnPolicy, prefix_of, with_samples
from assay.ops.train.overlap import overlap_with_states, shared_vocabulary, states_of
from assay.ops.train.teachers import CachedStates, CachedTopK, TopK, rows_of, top_k_of, top_k_sum


class Objective(NamedTuple):
    """What is minimised, in nats a position: (1 − c) · divergence + c · cross-entropy + hidden_weight · distance of hidden states."""

    loss: DivergenceName | Literal["cross_entropy"] = "forward_kl"  # cross_entropy alone asks no teacher
    beta: float = 0.5  # of jensen_shannon
    temperature: float = 1.0  # of both distributions of a divergence
    ce_pct: int = 0  # c, percent of cross-entropy with the text beside a divergence
    hidden: Pairs = ()
    hidden_weight: float = 1.0


class Bias(NamedTuple):
    """What a teacher's likeliest ids leave out, on held-out text: the bias of the loss is the second number less the third."""

    tail_mass: float  # of the teacher, beyond the k ids, averaged over positions
    top_k_loss_nats: float  # as it is minimised
    full_loss_nats: float  # of the full distributions


class _Trained(nn.Module):
    """A student, and what trains along with it and is no part of it."""

    def __init__(self, student: Any, maps: nn.ModuleList) -> None:
        super().__init__()
        self.student, self.maps = student, maps


def recover(
    student: Any,
    teacher: Any,
    windows: Int64[Tensor, "windows length"],
    held_out: Int64[Tensor, "held_out held_length"],
    *,
    objective: Objective = Objective(),  # noqa: B008
    settings: Settings,
    rows: int = 8,
    on_policy: OnPolicy = OnPolicy(),  # noqa: B008
    zeros: Mapping[str, Bool[Tensor, "..."]] | None = None,
    document_ends: Collection[int] = frozenset(),
    domains: Domains | None = None,
    bf16: bool = False,
    vocabulary: int | None = None,
    state: Path | None = None,
    run: dict[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Point]:
    """Train ``student``, in place, toward ``teacher`` at every position of a window, or of the text that is there.

    A batch is ``rows`` windows; see :class:`OnPolicy` for those that the student writes. The teacher reads each batch once, without gradient, or is
    looked up; nothing is differentiated through the sampling. Cross-entropy is taken where the text goes on: not at a window's last position, and
    not in rows that the student wrote. A row's mean over these positions counts for all of its positions, so that equal windows are equal tokens.

    Args:
        student: float32, on the teacher's device. Only parameters that require a gradient are trained.
        teacher: a model in evaluation mode, or what one said of ``windows`` and ``held_out``, in their order.
        held_out: text that is not trained on, for the evaluations.
        zeros: name of a parameter → True at weights that are zero and stay so.
        document_ends: see ``passes.final_states``; a cache has to be made with the same.
        domains: of the windows; a step then reads more of those whose loss is furthest above the teacher's, see ``domains.reader``.
        bf16: blocks multiply in bfloat16 (autocast), and so does the head, with sums in float32; weights, losses and evaluations stay float32.
        vocabulary: how many ids the tokenizer that both share has; ids beyond are padding. What both heads have, when None.
        state, run, progress: see ``loop.train``.
    Returns:
        The curve: the loss of each point as it is minimised, and the metrics of ``overlap.Overlap`` on ``held_out``, with a top-k cache those of
        :class:`Bias` too, with domains those of ``ops/train/domains.py``.
    Raises:
        ValueError: the teacher cannot give what is asked (samples and hidden states need the model), does not fit the windows, or heads are not
            the last layer; and what ``loop.train`` and ``on_policy.with_samples`` refuse.
        DivergedError: see ``loop.train``.
    Source:
        Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2023 (GKD), arXiv:2306.13649; Zhou et al. 2023 (DistillSpec), arXiv:2310.08461, unlike
        which the loss is taken at a prompt's positions too.
    """
    device, asked, ce_share = student.device, objective, _ce_share(objective)
    compare = None if asked.loss == "cross_entropy" else divergence(asked.loss, temperature=asked.temperature, beta=asked.beta)
    prefix = prefix_of(on_policy, windows.shape[1])
    if isinstance(teacher, CachedStates | CachedTopK):
        _require_looked_up(teacher, windows, held_out, asked, on_policy)
    teacher_head, shared = _heads(student, teacher, vocabulary, windows, held_out)
    maps = maps_between(head_of(student).weight.shape[1], teacher_head.weight.shape[1], asked.hidden, seed=settings.seed).to(device)
    student_blocks, teacher_blocks = ([pair[side] for pair in asked.hidden] for side in (0, 1))
    curve: list[Point] = []
    choose = reader(domains, curve, windows=len(windows), rows=rows, seed=settings.seed)

    def forward(model: Any, ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return passes.final_states(model, ids, document_ends=document_ends)

    def batches(step: int) -> list[Batch]:
        batch = batch_of(windows, choose(step), device)
        batch = with_samples(batch, step, student, on_policy, seed=settings.seed, vocabulary=shared)
        return split(batch, passes.FORWARD_TOKENS)

    def said(batch: Batch) -> Tensor | TopK:
        if isinstance(teacher, CachedTopK):
            return rows_of(rows_of(teacher.top, batch.numbers, device), batch.real, device)
        if isinstance(teacher, CachedStates):
            return teacher.states[batch.numbers.to(teacher.states.device)].to(device)[batch.real]
        return forward(teacher, batch.ids)[batch.real]

    def loss_of(batch: Batch) -> Loss:
        with passes.block_outputs(student, student_blocks) as own:
            states = forward(student, batch.ids)
        with torch.no_grad(), passes.block_outputs(teacher, teacher_blocks) as known:
            target = said(batch) if compare is not None or asked.hidden else None
        total, head = states.new_zeros(()), trainable_head(student)
        with passes.rounded_products(bf16):
            if compare is not None and isinstance(teacher, CachedTopK) and isinstance(target, TopK):
                total = total + (1 - ce_share) * top_k_sum(target, states[batch.real], head, compare, tail=teacher.tail)
            elif compare is not None and isinstance(target, Tensor):
                total = total + (1 - ce_share) * distillation_sum(
                    target, teacher_head, states[batch.real], head, compare, vocabulary=shared
                )
            if ce_share:
                total = total + ce_share * _text_sum(batch, states, head, shared)
        if asked.hidden:
            total = total + asked.hidden_weight * hidden_sum(own, known, asked.hidden, maps, batch.real)
        return Loss(total, int(batch.real.sum()))

    measures = _measures(teacher, teacher_head, held_out, shared, compare, domains, document_ends)

    def evaluate() -> dict[str, float]:
        states = states_of(student, held_out, document_ends=document_ends)
        return {name: value for measure in measures for name, value in measure(student, states).items()}

    told = {
        **asked._asdict(), "hidden": [list(pair) for pair in asked.hidden], "on_policy_pct": on_policy.pct, "rows": rows, "prefix": prefix,
        "teacher": type(teacher).__name__, "tail": getattr(teacher, "tail", None), "windows": list(windows.shape), "text": digest(windows),
        "vocabulary": shared, "document_ends": sorted(document_ends), "bf16": bf16,
        "domains": identity(domains),
        "zeros": {name: int(mask.sum()) for name, mask in (zeros or {}).items()},
    }  # fmt: skip
    train(
        _Trained(student, maps),
        batches,
        loss_of,
        settings,
        zeros={f"student.{name}": mask for name, mask in (zeros or {}).items()},
        curve=curve,
        evaluate=evaluate,
        state=state,
        run={**told, **(run or {})},
        progress=progress,
    )
    return with_weights(domains, curve)


def zeros_of(model: nn.Module, names: Collection[str]) -> dict[str, Bool[Tensor, "..."]]:
    """Where the named parameters are exactly zero, for ``zeros`` of :func:`recover`.

    Raises:
        ValueError: the model has no parameter of that name.
    """
    known = dict(model.named_parameters())
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"{type(model).__name__} has no parameter {unknown[0]}; names such as {next(iter(known))} were expected")
    return {name: known[name].detach() == 0 for name in names}


def _ce_share(asked: Objective) -> float:
    if asked.loss == "cross_entropy":
        if asked.ce_pct:
            raise ValueError(f"{asked.ce_pct} percent of cross-entropy beside cross-entropy; a divergence was expected, or 0 percent")
        return 1.0
    if not 0 <= asked.ce_pct < 100:
        raise ValueError(
            f"{asked.ce_pct} percent of cross-entropy beside {asked.loss}; 0 to 99 were expected, and loss cross_entropy is all of it"
        )
    return asked.ce_pct / 100


def _text_sum(batch: Batch, states: Tensor, head: Head, vocabulary: int) -> Tensor:
    """Cross-entropy with the text where it goes on, counted so that the mean over these positions of a row counts for all of its positions."""
    length = batch.ids.shape[1]
    follows = (batch.real & batch.text.unsqueeze(1))[:, :-1]
    found = cross_entropy_sum(batch.ids[:, 1:][follows], states[:, :-1][follows], head, vocabulary=vocabulary)
    return found * length / (length - 1)


def _heads(student: Any, teacher: Any, vocabulary: int | None, windows: Tensor, held_out: Tensor) -> tuple[Head, int]:
    """The teacher's head on the student's device, and how many ids both share; refuses models and text for which these are not all there is."""
    cached = isinstance(teacher, CachedStates | CachedTopK)
    if not cached and teacher.training:
        raise ValueError(
            f"the teacher, {type(teacher).__name__}, is in training mode, where dropout may change what it says; call teacher.eval() first"
        )
    device, own = student.device, head_of(student)
    head = _moved(teacher.head, device) if cached else head_of(teacher)
    shared, largest = shared_vocabulary(head, own, vocabulary), max(int(windows.max()), int(held_out.max()))
    if largest >= shared:
        raise ValueError(f"the text has id {largest}, and the models share {shared} ids; is it of the same tokenizer?")
    if isinstance(teacher, CachedTopK) and teacher.top.vocabulary != shared:
        raise ValueError(
            f"the teacher's likeliest ids are of {teacher.top.vocabulary}, and the student shares {shared} with it; make them of these"
        )
    check_head(student, own, windows[0].to(device))
    if not cached:
        check_head(teacher, head, windows[0].to(device))
    return head, shared


def _require_looked_up(
    teacher: CachedStates | CachedTopK, windows: Tensor, held_out: Tensor, asked: Objective, on_policy: OnPolicy
) -> None:
    """Refuse what cannot be looked up, and a cache of other windows."""
    if asked.hidden or on_policy.pct:
        what = (
            "hidden states of its blocks"
            if asked.hidden
            else f"what it says of the student's samples ({on_policy.pct} percent of the rows)"
        )
        raise ValueError(f"{what} cannot be looked up in a teacher's cache ({type(teacher).__name__}); give the model, or leave this out")
    if isinstance(teacher, CachedTopK) and teacher.tail == "bucket" and asked.temperature != 1 and asked.loss != "cross_entropy":
        raise ValueError(
            f"temperature={asked.temperature} with the tail in a bucket: how likely the tail is at another temperature than 1 was not kept; "
            "renormalised top-k, cached states, or temperature 1 work"
        )
    found = teacher.states.shape[:2] if isinstance(teacher, CachedStates) else teacher.top.ids.shape[:2]
    for what, cached, ids in (("windows", found, windows), ("held-out windows", teacher.held_out.shape[:2], held_out)):
        if cached != ids.shape:
            raise ValueError(
                f"the teacher's cache is of {what} {list(cached)}, and {list(ids.shape)} are given; make it of the same windows"
            )


def _measures(
    teacher: Any, head: Head, held_out: Tensor, shared: int, compare: Any, domains: Domains | None, document_ends: Collection[int]
) -> list[Callable[[Any, Tensor], dict[str, float]]]:
    """What an evaluation measures of a student and its final states on the held-out windows."""
    if isinstance(teacher, CachedStates | CachedTopK):
        held = teacher.held_out.to(head.weight.device)
    else:
        held = states_of(teacher, held_out, document_ends=document_ends)
    overlap = overlap_with_states(held, head, held_out, vocabulary=shared, document_ends=document_ends)
    found: list[Callable[[Any, Tensor], dict[str, float]]] = [lambda model, states: overlap(model, states)._asdict()]
    if isinstance(teacher, CachedTopK) and compare is not None:
        found.append(_bias_with(teacher, held, head.cut(shared), compare))
    if domains is not None:
        said = losses_of(domains, held_out, held, head, vocabulary=shared, name=REFERENCE)
        found.append(lambda model, states: losses_of(domains, held_out, states, head_of(model), vocabulary=shared) | said)
    return found


def _bias_with(teacher: CachedTopK, held: Tensor, head: Head, compare: Any) -> Callable[[Any, Tensor], dict[str, float]]:
    known = held.flatten(0, 1)
    top = top_k_of(held, head, teacher.top.ids.shape[-1])
    flat = rows_of(top, torch.ones_like(top.log_tail, dtype=torch.bool), held.device)

    def measure(student: Any, whole: Tensor) -> dict[str, float]:
        own, states = head_of(student), whole.flatten(0, 1)
        short = top_k_sum(flat, states, own, compare, tail=teacher.tail)
        full = distillation_sum(known, head, states, own, compare, vocabulary=top.vocabulary)
        return Bias(float(top.log_tail.exp().mean()), float(short) / len(states), float(full) / len(states))._asdict()

    return measure


def _moved(head: Head, device: torch.device) -> Head:
    return head._replace(weight=head.weight.to(device).float(), bias=None if head.bias is None else head.bias.to(device).float())
