"""How far a student's next-token distributions are from a teacher's, as losses: by token, and summed over many tokens in bounded memory.

Each divergence is named with its direction, takes (teacher, student), and gives nats a token: the sum over the vocabulary, never its mean.
Averages over real tokens are taken by whoever knows how many there are (``loop.py``). Not here: where hidden states come from (``recover.py``).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from assay.ops.evaluate.divergence import BLOCK, Head, head_of

DivergenceName = Literal["forward_kl", "reverse_kl", "total_variation", "jensen_shannon"]
CHUNK = 256  # tokens whose logits exist at a time
NEAREST_BETA = 0.01


def forward_kl(
    teacher: Float[Tensor, "tokens teacher_vocab"], student: Float[Tensor, "tokens student_vocab"], *, temperature: float = 1.0
) -> Float[Tensor, " tokens"]:
    """T² · KL(p‖q), of p = softmax(teacher / T) and q = softmax(student / T): the student is to cover all that the teacher says.

    As in all of them, logits of different width are cut to the ids that both have and renormalised, and log-softmax is float32 (float64 where
    both are). The gradient by the student's logits falls as 1/T² for the three KL-like losses and as 1/T for the total variation; the factors
    T² and T undo that (Hinton et al. 2015, §2, arXiv:1503.02531).

    Args:
        teacher, student: logits. The teacher's may require no gradient.
        temperature: above 0.
    """
    log_p, log_q = _log_probabilities(teacher, student, temperature)
    return temperature**2 * _kl(log_p, log_q)


def reverse_kl(
    teacher: Float[Tensor, "tokens teacher_vocab"], student: Float[Tensor, "tokens student_vocab"], *, temperature: float = 1.0
) -> Float[Tensor, " tokens"]:
    """T² · KL(q‖p): the student is to say nothing that the teacher would not."""
    log_p, log_q = _log_probabilities(teacher, student, temperature)
    return temperature**2 * _kl(log_q, log_p)


def total_variation(
    teacher: Float[Tensor, "tokens teacher_vocab"], student: Float[Tensor, "tokens student_vocab"], *, temperature: float = 1.0
) -> Float[Tensor, " tokens"]:
    """T · ½ Σ |p − q|; at T = 1 its complement is the share of the student's proposals that exact verification accepts.

    Source:
        Zhou et al. 2023 (DistillSpec), arXiv:2310.08461.
    """
    log_p, log_q = _log_probabilities(teacher, student, temperature)
    return temperature * 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1)


def jensen_shannon(
    teacher: Float[Tensor, "tokens teacher_vocab"],
    student: Float[Tensor, "tokens student_vocab"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Float[Tensor, " tokens"]:
    """T² · (β KL(p‖m) + (1 − β) KL(q‖m)), m = β p + (1 − β) q; at the ends the KL that it tends to when it is divided by β or 1 − β.

    Args:
        beta: the teacher's weight in the mixture: 0 is the forward KL and 1 the reverse one, exactly. Between them and 0.01 of either end the
            value nearly vanishes with β, whatever the distributions, and is refused.
    Raises:
        ValueError: ``beta`` is outside 0 to 1, or too near an end.
    Source:
        Agarwal et al. 2023 (GKD), arXiv:2306.13649.
    """
    if beta in (0, 1):
        return (reverse_kl if beta else forward_kl)(teacher, student, temperature=temperature)
    if not NEAREST_BETA <= beta <= 1 - NEAREST_BETA:
        raise ValueError(
            f"beta={beta} of the Jensen-Shannon loss; expected {NEAREST_BETA} to {1 - NEAREST_BETA}, or exactly 0 (forward KL) or 1 (reverse KL): "
            "nearer to an end the loss vanishes with beta"
        )
    log_p, log_q = _log_probabilities(teacher, student, temperature)
    ratio = log_q - log_p
    m_to_p = torch.logaddexp(ratio.new_tensor(math.log(beta)), ratio + math.log1p(-beta))  # log(m / p): 0 where p = q, to the last digit
    by_p, by_q = (log_p.exp() * m_to_p).sum(dim=-1), (log_q.exp() * (m_to_p - ratio)).sum(dim=-1)
    return temperature**2 * -(beta * by_p + (1 - beta) * by_q)


def cross_entropy(targets: Int64[Tensor, " tokens"], student: Float[Tensor, "tokens student_vocab"]) -> Float[Tensor, " tokens"]:
    """−log q of the token that comes next in the text: the control that knows no teacher."""
    return torch.nn.functional.cross_entropy(_wide(student), targets, reduction="none")


def divergence(name: DivergenceName, *, temperature: float = 1.0, beta: float = 0.5) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss called ``name`` as a function of the teacher's and the student's logits.

    Raises:
        ValueError: no such name, or a temperature that is not above 0.
    """
    known = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "total_variation": total_variation}
    if name not in get_args(DivergenceName):
        raise ValueError(f"no loss is named {name!r}; there are {', '.join(get_args(DivergenceName))}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}; a finite number above 0 was expected, and 1 leaves the distributions as they are")
    if name == "jensen_shannon":
        return partial(jensen_shannon, temperature=temperature, beta=beta)
    return partial(known[name], temperature=temperature)


def trainable_head(model: Any) -> Head:
    """The output head of ``model`` with its own parameters, through which gradients reach them; they must be float32.

    Raises:
        ValueError: the model has no linear output head, or its weights are not float32.
    """
    detached, linear = head_of(model), model.get_output_embeddings()
    if linear.weight.dtype != torch.float32:
        raise ValueError(
            f"the head of {type(model).__name__} is {linear.weight.dtype}; float32 weights are trained, so open it with dtype=float32"
        )
    return detached._replace(weight=linear.weight, bias=getattr(linear, "bias", None))


def distillation_sum(
    teacher: Float[Tensor, "tokens teacher_width"],
    teacher_head: Head,
    student: Float[Tensor, "tokens student_width"],
    student_head: Head,
    divergence: Callable[[Tensor, Tensor], Tensor],
    *,
    vocabulary: int | None = None,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """The sum of ``divergence`` over tokens, from final hidden states; differentiable by the student's states and head, once.

    Args:
        teacher: without gradient. Its head, and the student's, are float32.
        vocabulary: ids of the tokenizer; what heads have beyond them is padding and left out. What both heads have, when None.
        chunk: see :func:`chunked_sum`; the teacher's logits of a chunk are made when they are needed.
    """
    shared = min(len(teacher_head.weight), len(student_head.weight), vocabulary or len(student_head.weight))
    cut = teacher_head.cut(shared)
    buffer = torch.empty(min(chunk, max(len(teacher), 1)), shared, device=teacher.device)

    def teacher_logits(part: slice) -> Tensor:
        states = teacher[part]
        return cut.logits(states, buffer[: len(states)])

    return chunked_sum(student, student_head, teacher_logits, divergence, vocabulary=shared, chunk=chunk)


def cross_entropy_sum(
    targets: Int64[Tensor, " tokens"],
    student: Float[Tensor, "tokens width"],
    student_head: Head,
    *,
    vocabulary: int | None = None,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """The sum of :func:`cross_entropy` over tokens, from final hidden states; ``vocabulary`` as in :func:`distillation_sum`."""
    return chunked_sum(student, student_head, lambda part: targets[part], cross_entropy, vocabulary=vocabulary, chunk=chunk)


def chunked_sum(
    hidden: Float[Tensor, "tokens width"],
    head: Head,
    reference: Callable[[slice], Tensor],
    value: Callable[[Tensor, Tensor], Tensor],
    *,
    vocabulary: int | None = None,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """Σ value(reference, logits) over tokens, with logits of ``chunk`` tokens at a time and each of them made once.

    The gradient is found chunk by chunk in the forward pass and kept for the backward one, so that nothing is computed twice. Memory beyond
    the arguments: one [chunk × vocabulary] tensor of logits, which becomes their gradient; a few more of ``BLOCK`` elements; the gradients,
    [tokens × width] and [vocabulary × width].

    Args:
        reference: what ``value`` compares the logits of a slice of tokens with, one row a token: a teacher's logits, or target ids.
        value: (reference, logits) → one value a token.
        vocabulary: only the first so many ids; all of the head when None.
    """
    weight, bias = head.weight, head.bias
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    found = _Chunked.apply(hidden.to(weight.dtype), weight, bias, head, reference, value, vocabulary or len(weight), chunk)
    assert isinstance(found, Tensor)
    return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, reference: Any, value: Any, vocabulary: int, chunk: int) -> Tensor:  # fmt: skip
        wanted = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if wanted[0] else None
        by_weight = torch.zeros_like(weight) if wanted[1] else None
        by_bias = torch.zeros_like(bias) if wanted[2] and bias is not None else None
        cut_weight, cut_bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
        rows = max(1, BLOCK // vocabulary) if hidden.device.type == "cpu" else chunk
        buffer = hidden.new_empty(min(chunk, max(len(hidden), 1)), vocabulary)
        total = hidden.new_zeros((), dtype=torch.float64)
        for begin in range(0, len(hidden), chunk):
            part = slice(begin, begin + chunk)
            states, against = hidden[part], reference(part)
            logits = buffer[: len(states)]
            torch.mm(states, cut_weight.T, out=logits)
            if cut_bias is not None:
                logits += cut_bias
            for inner in range(0, len(states), rows):
                block = slice(inner, inner + rows)
                leaf = logits[block].detach().requires_grad_(any(wanted))
                with torch.set_grad_enabled(any(wanted)):
                    found = value(against[block], _finish(leaf, head)).sum()
                total += found.detach()
                if any(wanted):
                    logits[block] = torch.autograd.grad(found, leaf)[0]
            if by_hidden is not None:
                torch.mm(logits, cut_weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight[:vocabulary].addmm_(logits.T, states)
            if by_bias is not None:
                by_bias[:vocabulary] += logits.sum(dim=0)
        ctx.save_for_backward(by_hidden, by_weight, by_bias)
        return total.to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_total: Tensor) -> Any:
        return *(None if found is None else found * by_total[0] for found in ctx.saved_tensors), None, None, None, None, None


def _finish(logits: Tensor, head: Head) -> Tensor:
    """What the head does after its matrix product."""
    if head.scale != 1:
        logits = logits * head.scale
    return logits if head.cap is None else (logits / head.cap).tanh() * head.cap


def _log_probabilities(teacher: Tensor, student: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    shared = min(teacher.shape[-1], student.shape[-1])
    log_p, log_q = ((_wide(each[..., :shared]) / temperature).log_softmax(dim=-1) for each in (teacher, student))
    return log_p, log_q


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
