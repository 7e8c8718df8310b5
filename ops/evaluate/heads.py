"""What attention heads do: which ones copy from far back, continue a repetition, or rest on the first token.

All scores are [layers, heads], 0 to 1. Memory: the attention of one layer for one text, ``heads · tokens²`` floats, a few times over.
Not here: removing heads, or keeping them from it (``ops/prune``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay.ops.evaluate.divergence import final_hidden
from assay.ops.models import structure


class NeedlePrompt(NamedTuple):
    """A text that ends by repeating a passage of it: tokens ``start`` to ``stop`` (exclusive), the needle. ``answer`` is where that begins."""

    ids: Int[Tensor, " tokens"]
    start: int
    stop: int
    answer: int


def needle_prompt(
    haystack: Int[Tensor, " hay"],
    needle: Int[Tensor, " needle"],
    question: Int[Tensor, " question"],
    answer: Int[Tensor, " answer"],
    *,
    depth_pct: int,
) -> NeedlePrompt:
    """The needle after ``depth_pct`` percent of the haystack, rounded down to a token, then the question and the answer.

    Raises:
        ValueError: a percent outside 0 to 100; nothing before the answer; or an answer that is empty, or has a token that the needle has not.
    """
    if not 0 <= depth_pct <= 100:
        raise ValueError(f"depth_pct={depth_pct} is not between 0 and 100")
    foreign = sorted(set(answer.tolist()) - set(needle.tolist()))
    if foreign or not len(answer):
        raise ValueError(
            f"the answer has {len(answer)} tokens, of which {foreign} are not in the needle; one or more, copied from the needle, were expected"
        )
    at = len(haystack) * depth_pct // 100
    ids = torch.cat([haystack[:at], needle, haystack[at:], question, answer])
    return NeedlePrompt(ids, at, at + len(needle), len(ids) - len(answer))


def retrieval_scores(model: PreTrainedModel, prompts: Sequence[NeedlePrompt]) -> Float64[Tensor, "layers heads"]:
    """How often a head looks at what is copied: the share of the answer's tokens at whose prediction its most attended token is that very
    token, inside the needle; a mean over prompts.

    Raises:
        ValueError: no prompt, or a model in training.
    Source:
        Wu et al. 2024, §2, arXiv:2404.15574, who call a head with 0.1 or more a retrieval head. Unlike there the answer is given, not generated, so
        that a model that does not find it has scores too; and each token of the answer counts, a repeated one again.
    """

    def score(attention: Tensor, prompt: NeedlePrompt) -> Tensor:
        ids = prompt.ids.to(attention.device)
        top = attention[:, prompt.answer - 1 : -1].argmax(dim=-1)
        return ((top >= prompt.start) & (top < prompt.stop) & (ids[top] == ids[prompt.answer :])).double().mean(dim=-1)

    return _mean(model, [(prompt.ids, partial(score, prompt=prompt)) for prompt in prompts])


def induction_scores(
    model: PreTrainedModel, sequences: Int[Tensor, "sequences length"], *, first: int | None = None
) -> Float64[Tensor, "layers heads"]:
    """Each sequence is read twice in a row; the attention that a token of the second time pays to the one after its first occurrence, as a mean.

    Args:
        sequences: such as :func:`random_sequences` draws; of tokens that occur once in it.
        first: a token to put before, such as BOS.
    Raises:
        ValueError: no sequence, or a model in training.
    Source:
        Olsson et al. 2022, whose prefix matching it is, arXiv:2209.11895. Unlike there, a sequence is repeated once and not three times.
    """
    length, front = sequences.shape[1], 0 if first is None else 1

    def score(attention: Tensor) -> Tensor:
        second = torch.arange(front + length, front + 2 * length)
        return attention[:, second, second - length + 1].double().mean(dim=-1)

    start = sequences.new_full((front,), 0 if first is None else first)
    return _mean(model, [(torch.cat([start, each, each]), score) for each in sequences])


def sink_scores(model: PreTrainedModel, windows: Int[Tensor, "windows length"]) -> Float64[Tensor, "layers heads"]:
    """The attention on the first token, a mean over all tokens after it and all windows, which have no padding.

    Raises:
        ValueError: no window of two tokens, or a model in training.
    Source:
        Xiao et al. 2023, §3.1, arXiv:2309.17453.
    """
    if windows.shape[1] < 2:
        raise ValueError(
            f"windows has shape {list(windows.shape)}; two tokens or more are needed, since the first can look at nothing but itself"
        )
    return _mean(model, [(window, lambda attention: attention[:, 1:, 0].double().mean(dim=-1)) for window in windows])


def random_sequences(
    vocabulary: int, *, sequences: int, length: int, seed: int, without: Sequence[int] = ()
) -> Int[Tensor, "sequences length"]:
    """Token ids drawn from ``vocabulary`` without those in ``without`` (such as special tokens), each once in a sequence.

    Raises:
        ValueError: fewer ids than a sequence is long.
    """
    allowed = torch.tensor([token for token in range(vocabulary) if token not in set(without)])
    if not 1 <= length <= len(allowed):
        raise ValueError(f"a sequence of {length} different tokens cannot be drawn from {len(allowed)}; 1 to {len(allowed)} can")
    random = torch.Generator().manual_seed(seed)
    return torch.stack([allowed[torch.randperm(len(allowed), generator=random)[:length]] for _ in range(sequences)])


def heads_at_least(scores: Float[Tensor, "layers heads"], least: float) -> set[tuple[int, int]]:
    """The (layer, head) of each score that reaches ``least``: what pruning can be told to protect."""
    return {(layer, head) for layer, head in (scores >= least).nonzero().tolist()}


@contextmanager
def watched_attention(model: PreTrainedModel, take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand ``take`` the number of each block and its attention [texts, heads, queries, keys] as the model runs inside; rows sum to 1.

    The attention that transformers computes in plain steps is used meanwhile, since others never have the probabilities at hand.

    Raises:
        ValueError: a block gives none.
    """

    def hook(layer: int, module: nn.Module, _args: Any, output: Any) -> None:
        attention = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if attention is None:
            raise ValueError(
                f"{type(module).__name__} of block {layer} gives no attention probabilities; self_attn modules of transformers do"
            )
        take(layer, attention)

    before = str(model.config._attn_implementation)
    handles = [
        block.get_submodule("self_attn").register_forward_hook(partial(hook, layer)) for layer, block in enumerate(structure.blocks(model))
    ]
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()


def _mean(model: PreTrainedModel, texts: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]]) -> Float64[Tensor, "layers heads"]:
    """The mean over texts [tokens] of the score [heads] that goes with each, of its attention [heads, queries, keys]."""
    if not texts:
        raise ValueError("no text was given; at least one is needed to see what heads do")
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode, where dropout changes attention; call model.eval() first")
    sizes = structure.shape_numbers(model)
    total = torch.zeros(sizes["layers"], sizes["heads"], dtype=torch.float64)
    for ids, score in texts:

        def take(layer: int, attention: Tensor, score: Callable[[Tensor], Tensor] = score) -> None:
            total[layer] += score(attention[0]).cpu()

        window = ids[None].to(model.device)
        with watched_attention(model, take):
            final_hidden(model, window, torch.ones_like(window))
    if not total.isfinite().all():
        raise ValueError("attention is NaN on these texts, so heads cannot be told apart")
    return total / len(texts)
