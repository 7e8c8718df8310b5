"""A key-value cache that really stores fewer bits, and gives attention what it stored, dequantized.

Not here: what a cache would take by formula (``ops/cost``), or the loops that fill one (``ops/decode``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

E4M3_MAX = 448.0
SCALE_DTYPE = torch.bfloat16  # of the int8 format: one for the keys and one for the values of each token and head


class Int8Rows(NamedTuple):
    """Codes of rows (the last dimension), and one scale a row."""

    codes: Int8[Tensor, "*rows width"]
    scales: Float[Tensor, "*rows 1"]


def to_e4m3(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round to float8 e4m3 with unit scale; ±448 at most, infinity included, while NaN stays NaN.

    The format leaves overflow open and casts differ between builds, so the clamp comes first.

    Source:
        Micikevicius et al. 2022, §3, arXiv:2209.05433.
    """
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_int8_rows(values: Float[Tensor, "*rows width"]) -> Int8Rows:
    """Round each row to 255 levels around zero: s = max|x| / 127 in bfloat16, q = round(x / s).

    A row of zeros has the smallest scale and dequantizes to zeros. A row with NaN or infinity has such a scale, and dequantizes to NaN: it
    is never hidden.
    """
    values = values.float()
    scales = (values.abs().amax(dim=-1, keepdim=True) / 127).to(SCALE_DTYPE).clamp(min=torch.finfo(SCALE_DTYPE).tiny)
    codes = (values / scales.float()).round().clamp(-127, 127).nan_to_num(0)
    return Int8Rows(codes.to(torch.int8), scales)


def from_int8_rows(rows: Int8Rows) -> Float[Tensor, "*rows width"]:
    """x̂ = s q, float32."""
    return rows.codes.float() * rows.scales.float()


class StoredLayer(DynamicLayer):
    """One layer's keys and values in another form: each row is quantized when it arrives, in prefill as in decoding.

    ``keys`` and ``values`` hold the codes, [batch, heads, tokens, width]. A row depends on no other row, so one long call and many short
    ones store the same, and rows can be taken back. A sliding-window layer keeps all rows; the attention mask hides what left the window.
    """

    is_croppable = True
    parts: tuple[str, ...] = ("keys", "values")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new rows, and return all of them dequantized, the new ones too."""
        fresh = not self.is_initialized
        if fresh:
            self.lazy_initialization(key_states, value_states)
        for part, rows in self.encode(key_states, value_states).items():
            setattr(self, part, rows if fresh else torch.cat([getattr(self, part), rows], dim=-2))
        keys, values = self.decode()
        return keys.to(self.dtype), values.to(self.dtype)

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """The stored form of new rows, by part."""
        raise NotImplementedError

    def decode(self) -> tuple[Tensor, Tensor]:
        """All stored rows as float32 keys and values."""
        raise NotImplementedError

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            for part in self.parts:
                setattr(self, part, change(getattr(self, part)))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` rows; 0 removes none.

        Raises:
            ValueError: a positive number, or more rows than there are.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.get_seq_length():
            raise ValueError(
                f"crop({tokens_to_remove}) of a cache of {self.get_seq_length()} tokens; crop(-k) removes the last k, 0 ≤ k ≤ that"
            )
        if tokens_to_remove:
            self._each(lambda rows: rows[..., :tokens_to_remove, :])

    def reset(self) -> None:
        for part in self.parts:
            setattr(self, part, None)
        self.is_initialized = False

    def offload(self) -> None:
        self._each(lambda rows: rows.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._each(lambda rows: rows.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:  # type: ignore[override]
        self._each(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda rows: rows[indices, ...])


class E4m3Layer(StoredLayer):
    """Float8 e4m3, unit scale: one byte a value."""

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"keys": to_e4m3(keys), "values": to_e4m3(values)}

    def decode(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys.float(), self.values.float()


class Int8Layer(StoredLayer):
    """8-bit integers with one bfloat16 scale per token and head: width + 2 bytes for a key, as many for a value."""

    parts = ("keys", "key_scales", "values", "value_scales")

    def __init__(self) -> None:
        super().__init__()
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        key_rows, value_rows = to_int8_rows(keys), to_int8_rows(values)
        return dict(zip(self.parts, (*key_rows, *value_rows), strict=True))

    def decode(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None and self.key_scales is not None and self.value_scales is not None
        return from_int8_rows(Int8Rows(self.keys, self.key_scales)), from_int8_rows(Int8Rows(self.values, self.value_scales))


LAYERS: dict[str, type[StoredLayer]] = {"fp8_e4m3": E4m3Layer, "int8": Int8Layer}


class KvCache(DynamicCache):
    """A transformers cache that can say what it holds. Positions follow from the true number of tokens, :meth:`get_seq_length`."""

    def nbytes(self) -> int:
        """Bytes of the tensors held: codes, scales, or plain keys and values; 0 before the first token."""
        total = 0
        for layer in self.layers:
            names = getattr(layer, "parts", ("keys", "values"))
            total += sum(held.nbytes for name in names if (held := getattr(layer, name, None)) is not None)
        return total


def make_cache(model: PreTrainedModel, format: str | None = None) -> KvCache:
    """An empty cache for ``model``.

    Args:
        format: ``fp8_e4m3``, ``int8``, or None for the model's own dtype.
    Raises:
        ValueError: an unknown format, or a model with layers that keep something else than keys and values.
    """
    cache = KvCache(config=model.config)
    kinds = {type(layer) for layer in cache.layers}
    odd = sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
    if odd:
        raise ValueError(
            f"{type(model).__name__} keeps its past in {', '.join(odd)}; caches of full and sliding-window attention can be made and counted"
        )
    if format is not None:
        if format not in LAYERS:
            raise ValueError(f"no cache format {format!r}; {', '.join(LAYERS)} and None (the model's dtype) exist")
        cache.layers = [LAYERS[format]() for _ in cache.layers]  # type: ignore[assignment]
    return cache
