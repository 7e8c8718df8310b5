"""The step ``distill``: a compressed model is trained toward its base. Not here: any arithmetic, or where a training state is kept."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.ops.steps.domains import reading_of, told_of_domains
from assay.ops.steps.training import Running, load_teacher, settings_of, steps_of, told_of, with_curve
from assay.schemas.training import Distill

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from assay.ops.steps.training import Windows
    from assay.ops.train.teachers import CachedStates, CachedTopK

SAID = "said.safetensors"


def asked_of_teacher(step: Distill) -> dict[str, Any]:
    """What of ``step`` decides what the teacher says, so that runs which differ in the rest share it."""
    return {
        "kind": "teacher",
        "length": step.length,
        "windows": steps_of(step) * step.batch,
        "top_k": step.top_k,
        "text": step.text.model_dump(mode="json"),
        **({} if step.domains is None else {"domains": [domain.model_dump(mode="json") for domain in step.domains]}),
    }


def teach(step: Distill, teacher: Path, out: Path, *, windows: "Windows") -> dict[str, Any]:
    """Write what the teacher says of the text: its final hidden states in bfloat16, or its likeliest tokens; of held-out text the states in float32."""
    from safetensors.torch import save_file

    from assay.ops.evaluate.divergence import head_of
    from assay.ops.models.checkpoint import load_tokenizer
    from assay.ops.train.overlap import states_of
    from assay.ops.train.teachers import teacher_states, top_k_logits

    read, held_out, _ = reading_of(step, windows)
    model = load_teacher(teacher)
    tensors = {"held_out": states_of(model, held_out).cpu()}
    if step.top_k is None:
        tensors["states"] = teacher_states(model, read)
    else:
        vocabulary = min(len(load_tokenizer(teacher)), len(head_of(model).weight))
        top = top_k_logits(model, read, step.top_k, vocabulary=vocabulary)
        tensors |= {"ids": top.ids, "log_probabilities": top.log_probabilities, "log_tail": top.log_tail}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / SAID)
    return {"tokens": read.numel(), "held_out_tokens": held_out.numel()}


def distill(
    step: Distill,
    parent: Path,
    teacher: Path,
    out: Path,
    *,
    windows: "Windows",
    said: Path | None,
    running: Running = Running(),  # noqa: B008
) -> dict[str, Any]:
    """Train the dense checkpoint in ``parent`` toward ``teacher`` and write it as it was stored.

    Args:
        said: what :func:`teach` wrote; None where the teacher is run.
        windows: (text, windows, length) → token ids [windows, length].
    Returns:
        Steps, tokens, the recovery curve, and what a held-out text says of the student: before, after, and as stored.
    Raises:
        ValueError: the two have different tokenizers, ``parent`` is quantized or rotated online, or training diverged.
    """
    from assay.ops.models import checkpoint, dense
    from assay.ops.models.device import device, fast_in_bfloat16
    from assay.ops.steps.whole import opened, written
    from assay.ops.train.draft import eos_of, require_same_tokens
    from assay.ops.train.hidden import paired_blocks
    from assay.ops.train.lora import adapt, merge
    from assay.ops.train.on_policy import OnPolicy
    from assay.ops.train.recover import Objective, recover

    where, tokenizer = device(), checkpoint.load_tokenizer(teacher)
    bf16 = fast_in_bfloat16(where)
    require_same_tokens(tokenizer, checkpoint.load_tokenizer(parent))
    student, stored = opened(parent, step.kind)
    dense.move(student, device=where)
    read, held_out, domains = reading_of(step, windows)
    given = load_teacher(teacher) if said is None else _read(step, said, teacher, len(tokenizer))
    pairs = paired_blocks(layers_from(student, given)) if step.hidden_pct else ()
    objective = Objective(
        loss=step.loss, beta=step.beta_pct / 100, temperature=step.temperature, ce_pct=step.cross_entropy_pct, hidden=pairs,
        hidden_weight=step.hidden_pct / 100,
    )  # fmt: skip
    zeros = _zeros(student)
    adapted = None if step.lora is None else adapt(student, rank=step.lora.rank, alpha=step.lora.alpha, seed=running.seed)
    points = recover(
        student, given, read, held_out, objective=objective, settings=settings_of(step, running.seed), rows=step.batch, zeros=zeros, vocabulary=len(tokenizer),
        on_policy=OnPolicy(step.on_policy_pct, eos_ids=eos_of(student)), domains=domains, bf16=bf16, **running.followed,
    )  # fmt: skip
    if adapted is not None:
        merge(adapted)
    written(dense.move(student, stored, "cpu"), parent, out)
    return with_curve(out, {
        "loss": step.loss, "before": points[0].metrics, "after": points[-1].metrics, **told_of_domains(step),
        **told_of(step, points, held_out, bf16=bf16),
    })  # fmt: skip


def layers_from(student: "PreTrainedModel", teacher: Any) -> list[int]:
    """Which of the teacher's blocks each block of the student was.

    Raises:
        ValueError: the student has other blocks than all of the teacher's, and its config does not say which were left.
    """
    from assay.ops.models import structure
    from assay.ops.steps.prune_depth import LAYERS_FROM

    own, all_ = (len(structure.blocks(model)) for model in (student, teacher))
    known = getattr(student.config.get_text_config(decoder=True), LAYERS_FROM, None)
    if known is None and own != all_:
        raise ValueError(
            f"hidden_pct compares each block with the one that it was, but the {own} blocks of this checkpoint do not say which of the {all_} they were; "
            "a checkpoint of prune_depth does, or leave hidden_pct out"
        )
    return list(range(all_)) if known is None else list(known)


def _read(step: Distill, said: Path, teacher: Path, vocabulary: int) -> "CachedStates | CachedTopK":
    """What :func:`teach` wrote, with the head that turns states into distributions, all that is kept of the teacher."""
    from safetensors.torch import load_file

    from assay.ops.evaluate.divergence import head_of
    from assay.ops.train.teachers import CachedStates, CachedTopK, TopK

    stored, head = load_file(said / SAID), head_of(load_teacher(teacher))
    if step.top_k is None:
        return CachedStates(stored["states"], stored["held_out"], head)
    top = TopK(stored["ids"], stored["log_probabilities"], stored["log_tail"], min(vocabulary, len(head.weight)))
    return CachedTopK(top, stored["held_out"], head)


def _zeros(student: "PreTrainedModel") -> "dict[str, Tensor]":
    """Where the matrices of the blocks are zero and stay so, if weights were pruned."""
    from assay.ops.models.dense import PRUNED_KEY
    from assay.ops.models.experts import weight_views
    from assay.ops.train.recover import zeros_of

    if getattr(student.config, PRUNED_KEY, None) is None:
        return {}
    return zeros_of(student, {view.parameter for view in weight_views(student).values()})
