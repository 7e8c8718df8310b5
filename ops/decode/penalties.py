"""What changes logits by what the text holds already, and by wish. Not here: the order of the steps (``sampling``), filters (``filters``).

A *place* is ``row * vocabulary + id``: a token of the history of a row, once for each time that it occurs. Histories hold real tokens alone:
a padded batch has its pads taken off first, or they would count as said.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

Ids = Sequence[int] | Tensor


def bias(logits: Float[Tensor, "rows vocab"], pairs: Sequence[tuple[int, float]]) -> Float[Tensor, "rows vocab"]:
    """Add to the logit of each id in ``pairs``; -inf forbids a token. float32.

    Raises:
        ValueError: an id is none of the vocabulary.
    """
    if not pairs:
        return logits
    outside = [token for token, _ in pairs if not 0 <= token < logits.shape[-1]]
    if outside:
        raise ValueError(
            f"logit_bias names the id {outside[0]}, outside the vocabulary of {logits.shape[-1]}; was it meant for another tokenizer?"
        )
    ids, values = zip(*pairs, strict=True)
    result = logits.to(torch.float32, copy=True)
    result[:, list(ids)] += torch.tensor(values, dtype=torch.float32, device=logits.device)
    return result


def penalise_repetition(
    logits: Float[Tensor, "rows vocab"], places: Int64[Tensor, " places"], penalty: float
) -> Float[Tensor, "rows vocab"]:
    """Divide a positive logit by ``penalty`` and multiply a negative one, once for each distinct token however often it occurs. float32.

    Args:
        penalty: above 0; above 1 makes what has occurred less likely, 1 changes nothing.
    Source:
        Keskar et al. 2019, arXiv:1909.05858, which divides negative logits too and so makes them likelier.
    """
    if penalty == 1:
        return logits
    return _change(logits, places, lambda found: torch.where(found < 0, found * penalty, found / penalty))


def penalise_presence(logits: Float[Tensor, "rows vocab"], places: Int64[Tensor, " places"], penalty: float) -> Float[Tensor, "rows vocab"]:
    """Take ``penalty`` (nats) off the logit of each token that has occurred, however often. float32."""
    return logits if penalty == 0 else _change(logits, places, lambda found: found - penalty)


def penalise_frequency(
    logits: Float[Tensor, "rows vocab"], places: Int64[Tensor, " places"], penalty: float
) -> Float[Tensor, "rows vocab"]:
    """Take ``penalty`` (nats) off the logit of a token for each time that it has occurred: 0.1 after 50 times is 5. float32."""
    if penalty == 0:
        return logits
    counts = torch.zeros(logits.numel(), dtype=torch.float32, device=logits.device)
    times = counts.index_add_(0, places, torch.ones(len(places), device=logits.device))[places]
    return _change(logits, places, lambda found: found - penalty * times)


def places_of_rows(histories: Sequence[Sequence[Ids]], vocabulary: int, device: torch.device) -> Int64[Tensor, " places"]:
    """The places of rows that belong to different texts; the history of a row is the parts in ``histories[row]``, one after another.

    Ids at or above ``vocabulary`` are left out: they have no logit (a prompt may hold what the head has been cut off from).

    Raises:
        ValueError: an id is negative.
    """
    found = [
        _places(row, torch.cat([_ids(part, device) for part in parts]), vocabulary) for row, parts in enumerate(histories) if len(parts)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def places_of_text(prompt: Ids, emitted: Ids, *, rows: int, vocabulary: int, device: torch.device) -> Int64[Tensor, " places"]:
    """The places of ``rows`` consecutive rows of one text: the last comes after all of ``emitted``, the one before after all but its last.

    Raises:
        ValueError: an id is negative, or the first row would come before the first emitted token.
    """
    if rows - 1 > len(emitted):
        raise ValueError(
            f"{rows} rows of one text and {len(emitted)} emitted tokens; expected at least {rows - 1} emitted, since each row after the first "
            "follows one of them. Rows of different texts go to probabilities_of_rows"
        )
    text = torch.cat([_ids(prompt, device), _ids(emitted, device)])
    settled = len(text) - (rows - 1)
    return torch.cat([_places(row, text[: settled + row], vocabulary) for row in range(rows)])


def _ids(ids: Ids, device: torch.device) -> Int64[Tensor, " ids"]:
    if not isinstance(ids, Tensor):
        ids = torch.from_numpy(np.array(ids, dtype=np.int64))  # numpy reads a list in half the time of torch
    found = ids.to(device, torch.int64).flatten()
    if len(found) and int(least := found.min()) < 0:
        raise ValueError(f"the history has the id {int(least)}; expected ids of tokens, from 0 on, without pads")
    return found


def _places(row: int, ids: Int64[Tensor, " ids"], vocabulary: int) -> Int64[Tensor, " places"]:
    return ids[ids < vocabulary] + row * vocabulary


def _change(logits: Tensor, places: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """``logits`` in float32 with ``change`` of those at ``places``; where a place occurs twice, both give the same value."""
    result = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = result.view(-1)
    flat[places] = change(flat[places])
    return result
