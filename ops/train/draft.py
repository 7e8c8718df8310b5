"""DistillSpec: a draft is trained toward the target it will speculate for, on text and on its own samples.

Models and tensors in, the curve out. Not here: the losses (``losses.py``), the loop (``loop.py``), or making and saving models.
"""

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from assay.ops.data.tokens import vocabulary_digest
from assay.ops.evaluate.divergence import check_head, head_of, per_token
from assay.ops.train.batches import Batch, generator, marked, rows_at, split
from assay.ops.train.loop import Loss, Point, Progress, Settings, train
from assay.ops.train.losses import DivergenceName, distillation_sum, divergence, trainable_head

Sample = Callable[[Any, Tensor, int, torch.Generator], Tensor]
"""(model, prompts [rows, n], new tokens, generator) → ids [rows, n + new tokens]: continuations sampled at temperature 1."""

FORWARD_TOKENS = 4096  # positions in one forward pass; a larger batch is accumulated


class Overlap(NamedTuple):
    """How alike two models speak, averaged over positions. ``overlap``: Σ min(p, q) = 1 − TV, the expected share of accepted proposals."""

    overlap: float
    kl_nats: float
    top1_agreement: float


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
    """Train ``student``, in place, so that its next-token distributions come close to ``teacher``'s at every position of a sequence.

    A batch is ``rows`` windows of text. ``on_policy_pct`` percent of the rows, counted over the run, keep the beginning of their window
    and go on with what the student samples there at temperature 1; of these, what follows an end-of-sequence token counts for nothing.
    The teacher reads each batch once, without gradient; nothing is differentiated through the sampling.

    Args:
        student: float32, on the teacher's device. Only parameters that require a gradient are trained.
        held_out: text that is not trained on, for the evaluations.
        loss: see ``losses.py``; ``beta`` is for jensen_shannon.
        vocabulary: how many ids the tokenizer that both share has; ids beyond are padding. What both heads have, when None.
        sample: another generator of samples; :func:`sample_with_cache` when None.
        prefix: tokens of a window that a sample goes on from; a quarter of the window when None.
        state, run, progress: see ``loop.train``.
    Returns:
        The curve, with the metrics of :class:`Overlap` on ``held_out``.
    Raises:
        ValueError: a prefix outside the window, heads that are not the last layer, or what ``loop.train`` refuses.
        DivergedError: see ``loop.train``.
    Source:
        Zhou et al. 2023, arXiv:2310.08461. Unlike it the loss is taken at the prompt's positions too: a draft proposes there as well once
        a conversation goes on.
    """
    length = windows.shape[1]
    prefix = max(1, length // 4) if prefix is None else prefix
    if on_policy_pct and not 1 <= prefix < length:
        raise ValueError(f"a prefix of {prefix} tokens in windows of {length}; 1 to {length - 1} leave something to sample")
    shared = _shared(teacher, student, vocabulary)
    compare = divergence(loss, temperature=temperature, beta=beta)
    device, teacher_head = student.device, head_of(teacher)
    check_head(teacher, teacher_head, windows[0].to(device))
    check_head(student, head_of(student), windows[0].to(device))
    sampler = sample or default_sampler(shared)

    def batches(step: int) -> list[Batch]:
        ids = windows[rows_at(step, rows=rows, windows=len(windows), seed=settings.seed)].to(device)
        own = marked(step, rows=rows, pct=on_policy_pct).to(device)
        real = torch.ones_like(ids, dtype=torch.bool)
        if own.any():
            random = generator(settings.seed, "sample", step, device=device)
            with _sampling(student):
                ids[own] = sampler(student, ids[own][:, :prefix], length - prefix, random)
            real[own] = until_end(ids[own], prefix, eos_ids)
        return split(Batch(ids, real), FORWARD_TOKENS)

    def objective(batch: Batch) -> Loss:
        with torch.no_grad():
            target = final_states(teacher, batch.ids)[batch.real]
        states = final_states(student, batch.ids)[batch.real]
        total = distillation_sum(target, teacher_head, states, trainable_head(student), compare, vocabulary=shared)
        return Loss(total, int(batch.real.sum()))

    told = {
        "loss": loss, "beta": beta, "temperature": temperature, "on_policy_pct": on_policy_pct, "rows": rows, "prefix": prefix,
        "windows": list(windows.shape), "text": hashlib.sha256(windows.cpu().contiguous().numpy().data).hexdigest(), "vocabulary": shared,
    }  # fmt: skip
    metrics = overlap_with(teacher, held_out, vocabulary=shared)
    return train(
        student,
        batches,
        objective,
        settings,
        evaluate=lambda: metrics(student)._asdict(),
        state=state,
        run={**told, **(run or {})},
        progress=progress,
    )


def overlap_with(teacher: Any, held_out: Int64[Tensor, "windows length"], *, vocabulary: int | None = None) -> Callable[[Any], Overlap]:
    """What measures a student against ``teacher`` on ``held_out``, at every position but each window's last; the teacher reads the text once."""
    head, device = head_of(teacher), teacher.device
    batch = max(1, FORWARD_TOKENS // held_out.shape[1])

    @torch.no_grad()
    def states_of(model: Any) -> Float[Tensor, "tokens width"]:
        return torch.cat([final_states(model, part.to(device))[:, :-1].flatten(0, 1).float() for part in held_out.split(batch)])

    known = states_of(teacher)

    def measure(student: Any) -> Overlap:
        size = _shared(teacher, student, vocabulary)
        found = per_token(known, head.cut(size), states_of(student), head_of(student).cut(size), held_out[:, 1:].flatten())
        return Overlap(1 - float(found.tv.double().mean()), float(found.kl.double().mean()), float(found.agrees.double().mean()))

    return measure


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


def final_states(model: Any, ids: Int64[Tensor, "rows length"]) -> Float[Tensor, "rows length width"]:
    """What the head is given at every position. Padding may stand at the end of a row, where nothing real looks at it."""
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def until_end(ids: Int64[Tensor, "rows length"], prefix: int, eos_ids: Collection[int]) -> Bool[Tensor, "rows length"]:
    """True up to the position that predicts a sampled end of sequence; from the end itself on nothing is predicted that a draft would propose."""
    ended = torch.isin(ids[:, prefix:], torch.tensor(sorted(eos_ids), dtype=ids.dtype, device=ids.device)).cumsum(dim=1) > 0
    return torch.cat([torch.ones_like(ids[:, :prefix], dtype=torch.bool), ~ended], dim=1)


def eos_of(model: Any) -> frozenset[int]:
    """All ids that end a text, by the generation config of ``model``."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or ())


def default_sampler(vocabulary: int | None = None) -> Sample:
    """:func:`sample_with_cache` over the first ``vocabulary`` ids."""
    return lambda model, prompts, new_tokens, random: sample_with_cache(model, prompts, new_tokens, random, vocabulary=vocabulary)


@torch.no_grad()
def sample_with_cache(
    model: Any, prompts: Int64[Tensor, "rows n"], new_tokens: int, random: torch.Generator, *, vocabulary: int | None = None
) -> Int64[Tensor, "rows length"]:
    """Continue every prompt by ``new_tokens`` tokens drawn from the model's own distributions, through transformers' cache.

    One generator serves the batch, since training data need no draw that is independent of the neighbours. Nothing stops at an end of sequence.
    """
    from transformers import DynamicCache

    accepted = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"  # transformers renamed it and warns at the old name
    keep = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    cache, found, read = DynamicCache(config=model.config), prompts, prompts
    for _ in range(new_tokens):
        logits = model(input_ids=read, use_cache=True, **{name: cache}, **keep).logits[:, -1, :vocabulary]
        read = torch.multinomial(logits.float().softmax(dim=-1), 1, generator=random)
        found = torch.cat([found, read], dim=1)
    return found


@contextmanager
def _sampling(model: Any) -> Iterator[None]:
    """The model in evaluation mode, without gradients, and as it was after."""
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)


def _shared(teacher: Any, student: Any, vocabulary: int | None) -> int:
    """The ids that both heads and the tokenizer have."""
    sizes = [len(model.get_output_embeddings().weight) for model in (teacher, student)]
    return min(*sizes, vocabulary or sizes[0])
