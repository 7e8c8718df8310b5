"""One text being read by one model through its cache, with rollback. Not here: choosing tokens (``sampling``) or the loops over them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.kv.cache import make_cache


class Session:
    """A causal LM, its key-value cache and how many tokens this holds; batch of one.

    Args:
        model: a transformers causal LM in evaluation mode.
        kv_format: how keys and values are stored; None keeps the model's dtype.
        rollback: whether :meth:`rollback` will be called; a sliding-window layer then keeps the rows that leave its window until the next call.
    Raises:
        ValueError: the model is in training mode, or has layers that keep something else than keys and values, which cannot be taken back.
    """

    def __init__(self, model: Any, *, kv_format: str | None = None, rollback: bool = False) -> None:
        if model.training:
            raise ValueError(f"{type(model).__name__} is in training mode, where dropout may change its logits; call model.eval() first")
        self.model = model
        self.device: torch.device = model.device
        self.length = 0
        self.cache = make_cache(model, kv_format)
        if rollback:
            self.cache.activate_past_recording()
        accepted = inspect.signature(model.forward).parameters
        # transformers renamed past_key_values to cache and warns at the old name.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._positions = "position_ids" in accepted
        self._keep = "logits_to_keep" in accepted

    def read(self, ids: Sequence[int], *, keep: int) -> Float[Tensor, "keep vocab"]:
        """Append ``ids`` to the text and return the logits of the last ``keep`` of them."""
        arguments: dict[str, Any] = {self._cache_name: self.cache, "use_cache": True}
        if self._positions:
            arguments["position_ids"] = torch.arange(self.length, self.length + len(ids), device=self.device).unsqueeze(0)
        if self._keep:
            arguments["logits_to_keep"] = keep
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([list(ids)], device=self.device), **arguments).logits
        self.length += len(ids)
        return logits[0, -keep:]

    def rollback(self, rows: int) -> None:
        """Take the last ``rows`` tokens back; with 0 a sliding-window layer lets go of what has left its window."""
        if not 0 <= rows <= self.length:
            raise ValueError(f"cannot take {rows} rows back from a cache of {self.length}")
        self.cache.crop(-rows)  # a negative count is the number of rows to remove; positive ones are refused by transformers
        self.length -= rows


def vocabulary_size(model: Any) -> int:
    """How many ids ``model`` gives a logit."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def check_prompt(prompt_ids: "Sequence[int] | Tensor", size: int) -> list[int]:
    """The prompt as a list of ids.

    Raises:
        ValueError: it is empty, a batch of several, or has an id outside 0 … ``size`` - 1.
    """
    if isinstance(prompt_ids, Tensor):
        if prompt_ids.ndim == 2 and prompt_ids.shape[0] != 1:
            raise ValueError(
                f"a batch of {prompt_ids.shape[0]} prompts; expected one, as shape [1, tokens] or a list of ids. Call once per prompt"
            )
        prompt_ids = prompt_ids.flatten().tolist()
    ids = [int(token) for token in prompt_ids]
    if not ids:
        raise ValueError("the prompt has no tokens; expected at least one, for instance the tokenizer's beginning-of-sequence id")
    outside = [token for token in ids if not 0 <= token < size]
    if outside:
        raise ValueError(f"the prompt has the id {outside[0]}, outside the model's vocabulary of {size}; was it made by another tokenizer?")
    return ids


def read_clock(clock: Callable[[], float], device: torch.device) -> float:
    """The time once everything queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()
