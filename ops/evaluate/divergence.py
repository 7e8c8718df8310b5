"""How far a variant's next-token distributions are from the base's, token by token. Not here: text and windows, or averages (``summarise.py``).

Only final hidden states are kept; logits are made from them a chunk at a time, so that no [tokens × vocabulary] tensor ever exists.
"""

import inspect
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

BLOCK = (
    1 << 19
)  # elements (2 MiB of float32) handled at a time on a CPU: they stay in its second-level cache from one operation to the next


class Head(NamedTuple):
    """What turns final hidden states into logits: ``cap · tanh(scale · (h Wᵀ + b) / cap)``, where cap and b may be absent."""

    weight: Float[Tensor, "vocab hidden"]  # float32
    bias: Float[Tensor, " vocab"] | None = None
    scale: float = 1.0
    cap: float | None = None

    def cut(self, size: int) -> "Head":
        """The head of the first ``size`` ids."""
        return self._replace(weight=self.weight[:size], bias=None if self.bias is None else self.bias[:size])

    def logits(
        self, hidden: Float[Tensor, "tokens hidden"], out: Float[Tensor, "tokens vocab"] | None = None
    ) -> Float[Tensor, "tokens vocab"]:
        """In float32, into ``out`` if given."""
        if self.bias is None:
            logits = torch.mm(hidden.float(), self.weight.T, out=out)
        else:
            logits = torch.addmm(self.bias, hidden.float(), self.weight.T, out=out)
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits


class BaseStatistics(NamedTuple):
    """What of the base's distributions is needed again for each variant; nats."""

    logsumexp: Float[Tensor, " tokens"]
    entropy: Float[Tensor, " tokens"]
    nll: Float[Tensor, " tokens"]
    top: Int64[Tensor, " tokens"]  # the most likely id


class PerToken(NamedTuple):
    """Per scored position; nats, but for ``tv`` (0 to 1) and ``agrees``."""

    kl: Float[Tensor, " tokens"]
    tv: Float[Tensor, " tokens"]
    agrees: Bool[Tensor, " tokens"]  # the base's most likely id is also the variant's
    nll: Float[Tensor, " tokens"]
    base_nll: Float[Tensor, " tokens"]
    base_entropy: Float[Tensor, " tokens"]


def head_of(model: Any) -> Head:
    """The output head of a causal language model, in float32 (shared with the model where that is float32 already).

    Raises:
        ValueError: the model has no linear output head.
    """
    linear = model.get_output_embeddings()
    if linear is None or getattr(linear, "weight", None) is None or linear.weight.ndim != 2:
        raise ValueError(f"{type(model).__name__} has no linear output head; expected a causal language model with one, such as lm_head")
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    bias = getattr(linear, "bias", None)
    return Head(
        linear.weight.detach().float(),
        None if bias is None else bias.detach().float(),
        scale,
        getattr(config, "final_logit_softcapping", None),
    )


@torch.inference_mode()
def final_hidden(
    model: Any, ids: Int64[Tensor, "windows length"], mask: Int64[Tensor, "windows length"], cache: Any = None
) -> Float[Tensor, "windows length hidden"]:
    """What the head is given: the states after the final norm, without running the head. States at padded positions mean nothing.

    Padding may be on either side: positions count real tokens only, and the mask is left out where nothing is padded.
    """
    body, keywords = model.base_model, {}
    if cache is not None:  # transformers renamed past_key_values to cache and warns at the old name
        keywords["cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"] = cache
    if bool((mask == 0).any()):
        keywords |= {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp_(min=0)}
    return body(input_ids=ids, use_cache=cache is not None, **keywords).last_hidden_state


@torch.inference_mode()
def check_head(model: Any, head: Head, ids: Int64[Tensor, " tokens"]) -> None:
    """Refuse a model whose logits are not ``head`` of its final hidden states (an architecture that does more after the last norm).

    Raises:
        ValueError: they differ by more than rounding.
    """
    ids = ids[None, :8]
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    ours = head.logits(final_hidden(model, ids, torch.ones_like(ids))[0])
    tolerance = (1e-4 if model.dtype == torch.float32 else 3e-2) * max(1.0, float(logits.abs().max()))
    difference = float((logits[:, : ours.shape[1]] - ours).abs().max())
    if difference > tolerance:
        raise ValueError(
            f"the logits of {type(model).__name__} differ by {difference:.3g} from its head applied to its final hidden states (at most "
            f"{tolerance:.3g} was expected); head_of must learn what this architecture does after its last norm"
        )


@torch.inference_mode()
def reference(hidden: Float[Tensor, "tokens hidden"], head: Head, targets: Int64[Tensor, " tokens"], *, chunk: int = 128) -> BaseStatistics:
    """The statistics of the base that :func:`per_token` uses again; float32."""
    first, second, third = (torch.empty(len(targets)) for _ in range(3))
    found = BaseStatistics(first, second, third, torch.empty(len(targets), dtype=torch.int64))
    buffer = _buffer(head, chunk, hidden.device)
    targets = targets.to(hidden.device)
    for begin in range(0, len(targets), chunk):
        part = slice(begin, begin + chunk)
        logits = head.logits(hidden[part], buffer[: len(targets[part])])
        for statistic, values in zip(found, _statistics(logits, targets[part]), strict=True):
            statistic[part] = values
    return found


def _statistics(logits: Tensor, targets: Tensor) -> BaseStatistics:
    lse = logits.logsumexp(dim=-1)
    target = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    top = logits.argmax(dim=-1)
    log_p = logits - lse.unsqueeze(1)
    return BaseStatistics(lse, -_row_dot(log_p.exp(), log_p), lse - target, top)


@torch.inference_mode()
def per_token(
    base_hidden: Float[Tensor, "tokens base_hidden"],
    base_head: Head,
    hidden: Float[Tensor, "tokens hidden"],
    head: Head,
    targets: Int64[Tensor, " tokens"],
    *,
    base: BaseStatistics | None = None,
    chunk: int = 128,
) -> PerToken:
    """KL(base‖variant), total variation, agreement and likelihoods at each position, in float32.

        kl = Σ p (log p − log q) + Σ (q − p)        tv = ½ Σ |p − q|

    The second sum is zero for distributions; written out, it cancels the rounding of the two normalisers to first order (each term of the whole
    is then p·f(q/p) with f(x) = x − 1 − log x ≥ 0), so that the KL of a model with itself is 0 and small values keep their digits.

    Where the heads have different widths (the same token list, padded differently), both are cut to the ids they share and renormalised.

    Args:
        base: what :func:`reference` found for these positions; found here when left out, or when the base's head is cut.
        chunk: positions whose logits exist at a time; 128 to 256 keep the matrix product efficient.
    Returns:
        ``agrees`` counts a tie at the variant's maximum as agreement. Values that are not finite stay so.
    """
    shared = min(len(base_head.weight), len(head.weight))
    if targets.numel() and int(targets.max()) >= shared:
        raise ValueError(f"target id {int(targets.max())} is outside the {shared} ids that both heads have; is it the same tokenizer?")
    if len(base_head.weight) > shared:
        base, base_head = None, base_head.cut(shared)
    head = head.cut(shared)
    found = PerToken(*(torch.empty(len(targets), dtype=torch.bool if name == "agrees" else torch.float32) for name in PerToken._fields))
    device = hidden.device
    targets = targets.to(device)
    first, second = _buffer(head, chunk, device), _buffer(head, chunk, device)
    rows = max(1, BLOCK // shared) if device.type == "cpu" else chunk
    for begin in range(0, len(targets), chunk):
        part = slice(begin, begin + chunk)
        size = len(targets[part])
        base_logits = base_head.logits(base_hidden[part].to(device), first[:size])
        logits = head.logits(hidden[part], second[:size])
        for inner in range(0, size, rows):
            block = slice(inner, min(inner + rows, size))
            at = slice(begin + block.start, begin + block.stop)
            statistics = _statistics(base_logits[block], targets[at]) if base is None else BaseStatistics(*(part[at] for part in base))
            values = _compare(base_logits[block], logits[block], targets[at], statistics)
            for result, value in zip(found, values, strict=True):
                result[at] = value
    return found


def _compare(base_logits: Tensor, logits: Tensor, targets: Tensor, base: BaseStatistics) -> PerToken:
    """One block, in place: both logits are overwritten."""
    top = logits.gather(1, base.top.to(logits.device).unsqueeze(1)).squeeze(1)
    target = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    maximum = logits.amax(dim=1)
    log_q = logits.sub_(maximum.unsqueeze(1))
    q = log_q.exp()
    total = q.sum(dim=1)
    log_total = total.log()
    q.div_(total.unsqueeze(1))
    log_ratio = base_logits.sub_(base.logsumexp.to(logits.device).unsqueeze(1))  # log p, until q's logarithm is taken from it
    p = log_ratio.exp()
    log_ratio.sub_(log_q.sub_(log_total.unsqueeze(1)))
    kl = _row_dot(p, log_ratio)
    difference = q.sub_(p)
    kl.add_(difference.sum(dim=1))
    tv = torch.linalg.vector_norm(difference, ord=1, dim=1).mul_(0.5)
    return PerToken(kl, tv, top == maximum, maximum + log_total - target, base.nll, base.entropy)


def _row_dot(left: Tensor, right: Tensor) -> Tensor:
    """Σ over columns of left · right, without a product the size of both."""
    return torch.bmm(left.unsqueeze(1), right.unsqueeze(2)).flatten()


def _buffer(head: Head, chunk: int, device: torch.device) -> Tensor:
    return torch.empty(chunk, len(head.weight), dtype=torch.float32, device=device)
