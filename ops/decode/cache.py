"""Keys and values of several texts, preallocated, with rows that can be taken back. Not here: attention (``forward``), what a cache costs (``ops/cost``).

A *slot* is where a token's key and value lie, counted from 0 in each row without gaps; its *position* is where it stands in the text, and is what rotates
its key. They are equal until something is evicted, and nothing here takes one for the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.ops.decode.architecture import Architecture
from assay.ops.kv.cache import SCALE_DTYPE, Int8Rows, from_int8_rows, to_e4m3, to_int8_rows

FORMATS = (None, "fp8_e4m3", "int8")


class Step(NamedTuple):
    """Tokens to read at once, those of one text in order. ``keep`` are the indices of the tokens whose logits are wanted, ascending."""

    ids: Int[Tensor, " tokens"]
    rows: Int[Tensor, " tokens"]
    slots: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    keep: Int[Tensor, " kept"]


class Cache:
    """``rows`` texts of at most ``capacity`` tokens each.

    Args:
        format: how keys and values are stored: None is ``dtype`` itself; ``fp8_e4m3`` with unit scale; ``int8`` with one bfloat16 scale a token and head.
    Attributes:
        keys, values: [layers, rows, kv_heads, capacity, head_dim], as stored.
        key_scales, value_scales: [layers, rows, kv_heads, capacity], for ``int8`` alone.
        positions: [rows, capacity] of the slots that hold a token.
        counts: slots in use, a row; positions_next: the position of the next token, a row.
    Raises:
        ValueError: no row, no room, or a format that is not stored here.
    """

    def __init__(
        self,
        shape: Architecture,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        format: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"a cache of {rows} rows and {capacity} tokens holds nothing; expected at least 1 of each")
        if format not in FORMATS:
            raise ValueError(f"the KV format {format!r} is not stored here; {', '.join(str(known) for known in FORMATS)} are")
        size = (len(shape.layers), rows, shape.kv_heads, capacity, shape.head_dim)
        stored = {None: dtype, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}[format]
        # Zeros, not garbage: attention over static shapes multiplies slots that hold nothing by 0.
        self.keys, self.values = (torch.zeros(size, dtype=stored, device=device) for _ in range(2))
        self.key_scales, self.value_scales = (
            (torch.zeros(size[:-1], dtype=SCALE_DTYPE, device=device) if format == "int8" else None) for _ in range(2)
        )
        self.positions = torch.zeros(rows, capacity, dtype=torch.int32, device=device)
        self.format, self.dtype = format, dtype
        self.counts, self.positions_next = [0] * rows, [0] * rows
        self._retained = [0] * rows  # slots, a row, that no rollback reaches: their positions may have gaps

    @property
    def rows(self) -> int:
        return len(self.counts)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def size_bytes(self) -> int:
        """Of the tensors held, used or not."""
        held = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def require_room(self, ids: Sequence[Sequence[int]]) -> None:
        """Raise ValueError where a row has no room for its new tokens."""
        for row, (held, new) in enumerate(zip(self.counts, ids, strict=True)):
            if held + len(new) > self.capacity:
                raise ValueError(
                    f"row {row} holds {held} tokens and is to read {len(new)} more, but its cache has room for {self.capacity}; "
                    "ask for a larger capacity"
                )

    def append(self, ids: Sequence[Sequence[int]], *, keep: Sequence[int]) -> Step:
        """Give the next tokens of each row their slots, and say how to read them; their keys and values are still to be written.

        Args:
            ids: new tokens a row; none for a row that waits.
            keep: of how many of its last tokens each row wants the logits.
        Raises:
            ValueError: a row has no room left, or is asked for more logits than it reads tokens. Nothing has changed then.
        """
        self.require_room(ids)
        for row, (new, wanted) in enumerate(zip(ids, keep, strict=True)):
            if not 0 <= wanted <= len(new):
                raise ValueError(
                    f"row {row} reads {len(new)} tokens and wants the logits of {wanted}; it can have those of 0 to all of them"
                )
        columns: list[list[int]] = [[], [], [], []]
        kept: list[int] = []
        for row, (new, wanted) in enumerate(zip(ids, keep, strict=True)):
            count, position, total = self.counts[row], self.positions_next[row], len(columns[0])
            for column, more in zip(
                columns, (new, [row] * len(new), range(count, count + len(new)), range(position, position + len(new))), strict=True
            ):
                column.extend(more)
            kept += range(total + len(new) - wanted, total + len(new))
            self.counts[row] += len(new)
            self.positions_next[row] += len(new)
        device = self.keys.device
        tokens, rows, slots, positions = (torch.tensor(column, dtype=torch.int64, device=device) for column in columns)
        self.positions[rows, slots] = positions.int()
        return Step(tokens, rows, slots, positions, torch.tensor(kept, dtype=torch.int64, device=device))

    def rollback(self, counts: Sequence[int]) -> None:
        """Take back the last ``counts`` tokens of each row.

        Raises:
            ValueError: not one number a row, or a row was not given that many since :meth:`retain`. Nothing has changed then.
        """
        if len(counts) != self.rows:
            raise ValueError(f"{len(counts)} counts for a cache of {self.rows} rows; expected one each, 0 for a row that keeps all")
        for row, count in enumerate(counts):
            if not 0 <= count <= self.counts[row] - self._retained[row]:
                raise ValueError(
                    f"cannot take {count} tokens back from row {row}, which holds {self.counts[row]}"
                    + (f", {self._retained[row]} of them since before others were evicted" if self._retained[row] else "")
                )
        for row, count in enumerate(counts):
            self.counts[row] -= count
            self.positions_next[row] -= count

    def reorder(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of what row ``sources[i]`` was."""
        if len(sources) != self.rows or not all(0 <= source < self.rows for source in sources):
            raise ValueError(f"sources={list(sources)} for a cache of {self.rows} rows; expected one existing row for each")
        if list(sources) == list(range(self.rows)):
            return
        used = max(self.counts)
        index = torch.tensor(list(sources), device=self.keys.device)
        for tensor in (self.keys, self.values, self.key_scales, self.value_scales):
            if tensor is not None:
                tensor[:, :, :, :used] = tensor[:, index, :, :used]
        self.positions[:, :used] = self.positions[index, :used]
        self.counts = [self.counts[source] for source in sources]
        self.positions_next = [self.positions_next[source] for source in sources]
        self._retained = [self._retained[source] for source in sources]

    def retain(self, slots: Sequence[Sequence[int]]) -> None:
        """Evict what is not in ``slots``, of each row; what stays moves to the front and keeps its position and its rotation.

        Raises:
            ValueError: slots that hold nothing, or that are not ascending.
        """
        for row, kept in enumerate(slots):
            if list(kept) != sorted(set(kept)) or not all(0 <= slot < self.counts[row] for slot in kept):
                raise ValueError(f"row {row} is to keep the slots {list(kept)}; expected ascending ones of the {self.counts[row]} it holds")
        for row, kept in enumerate(slots):
            index = torch.tensor(list(kept), dtype=torch.int64, device=self.keys.device)
            for tensor in (self.keys, self.values, self.key_scales, self.value_scales):
                if tensor is not None:
                    tensor[:, row, :, : len(kept)] = tensor[:, row, :, index]
            self.positions[row, : len(kept)] = self.positions[row, index]
            self.counts[row] = self._retained[row] = len(kept)

    def write(
        self, layer: int, step: Step, keys: Float[Tensor, "tokens kv_heads dim"], values: Float[Tensor, "tokens kv_heads dim"]
    ) -> None:
        """Store rotated keys, and values, of the tokens of ``step``."""
        for stored, scales, new in ((self.keys, self.key_scales, keys), (self.values, self.value_scales, values)):
            if self.format == "int8":
                assert scales is not None
                codes = to_int8_rows(new)
                scales[layer][step.rows, :, step.slots] = codes.scales.squeeze(-1)
                new = codes.codes
            elif self.format == "fp8_e4m3":
                new = to_e4m3(new)
            stored[layer][step.rows, :, step.slots] = new.to(stored.dtype)

    def read(
        self, layer: int, used: int, rows: Int[Tensor, " readers"] | None = None
    ) -> tuple[Float[Tensor, "readers kv_heads used dim"], Float[Tensor, "readers kv_heads used dim"]]:
        """Keys and values of the first ``used`` slots of these rows (None: of all), in ``dtype``."""
        found = []
        for stored, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            part = stored[layer, :, :, :used] if rows is None else stored[layer, rows, :, :used]
            if scales is not None:
                scale = scales[layer, :, :, :used] if rows is None else scales[layer, rows, :, :used]
                part = from_int8_rows(Int8Rows(part, scale.unsqueeze(-1)))
            found.append(part.to(self.dtype))
        return found[0], found[1]
