"""One pass of a model over a batch: the states that its head is given, those after chosen blocks, and documents that do not see one another.

Not here: what is done with the states (``losses.py``, ``hidden.py``).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from assay.ops.models import structure

FORWARD_TOKENS = 4096  # positions in one forward pass; a larger batch is accumulated


@contextmanager
def rounded_products(enabled: bool) -> Iterator[None]:
    """Float32 matrices on a CPU are multiplied with their entries rounded to bfloat16 inside: sums and results stay float32.

    For a head, whose logits of many thousand ids would lose too much in bfloat16 themselves. Nothing changes where oneDNN has no such products.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if enabled:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def final_states(
    model: Any, ids: Int64[Tensor, "rows length"], *, document_ends: Collection[int] = frozenset()
) -> Float[Tensor, "rows length width"]:
    """What the head is given at every position. Padding may stand at the end of a row, where nothing real looks at it.

    Args:
        document_ends: ids after which another document begins, that sees nothing of the one before; a row is one document when empty.
    """
    keywords = {} if not document_ends else {"position_ids": document_positions(ids, document_ends)}
    return model.base_model(input_ids=ids, use_cache=False, **keywords).last_hidden_state


def document_positions(ids: Int64[Tensor, "rows length"], ends: Collection[int]) -> Int64[Tensor, "rows length"]:
    """Each token's place in its document: 0 at the start of a row and after each of ``ends``.

    transformers takes such positions, given without a mask, for packed sequences and keeps attention inside each of them.
    """
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    ended = torch.isin(ids, torch.tensor(sorted(ends), dtype=ids.dtype, device=ids.device))[:, :-1]
    begins = torch.cat([torch.zeros_like(places[:, :1]), torch.where(ended, places[:, 1:], 0)], dim=1)
    return places - begins.cummax(dim=1).values


@contextmanager
def block_outputs(model: Any, numbers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """The residual stream [rows, length, width] after each of the named blocks, of the last forward made inside.

    Raises:
        ValueError: a number outside the model.
    """
    blocks = structure.blocks(model) if numbers else nn.ModuleList()
    wrong = [number for number in numbers if not 0 <= number < len(blocks)]
    if wrong:
        raise ValueError(
            f"blocks {wrong} of {type(model).__name__}, which has {len(blocks)}; numbers from 0 to {len(blocks) - 1} were expected"
        )
    found: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            found[number] = output if isinstance(output, Tensor) else output[0]

        return hook

    hooks = [blocks[number].register_forward_hook(keep(number)) for number in sorted(set(numbers))]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
