"""Decode steps as CUDA graphs: :class:`assay.ops.decode.forward.TorchRunner` again, without its launches one by one. Not here: choosing it (``engine``).

In small steps launching kernels takes longer than running them. A graph holds all launches of :meth:`TorchRunner.forward_static` and replays them in one,
over the same memory each time: what a step reads is copied into static inputs first, what it gives is copied out of static logits.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.ops.decode.cache import Cache, Step
from assay.ops.decode.forward import TorchRunner

WIDEST = 16  # tokens a row; a wider step keeps the device busy by itself
ROUND = 64  # slots: caches of nearly the same size share their graphs
IDLE = 2  # caches let go whose memory and graphs are kept for the next texts
STORED = ("keys", "values", "key_scales", "value_scales", "positions")

Replay = Callable[[], Tensor]


class Capture(Protocol):
    """Records what a call launches. What it returns launches that again, over the same memory, and returns the same tensor, filled anew.

    The work may be run while it is recorded; it writes the same then as when it is replayed.
    """

    def __call__(self, work: Callable[[], Tensor], device: torch.device) -> Replay: ...


def capture_cuda(work: Callable[[], Tensor], device: torch.device) -> Replay:
    """A CUDA graph of ``work``, which is run twice before, on another stream: kernels are compiled and libraries set up by then."""
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(2):
            work()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


@dataclass(eq=False, frozen=True)
class Slab:
    """Memory that a cache lies in, with more slots than the cache has, and by the width of a step its inputs and its graph.

    The slot behind the last of the cache is the *spare* one: an entry of a step that is no token writes there, and no text does.
    Inputs are ids, slots and positions, [3, rows, width].
    """

    body: Cache
    inputs: dict[int, Int[Tensor, "3 rows width"]] = field(default_factory=dict)
    graphs: dict[int, Replay] = field(default_factory=dict)


class Given(NamedTuple):
    """A step as the host knows it: of each row the new ids, of how many the logits are wanted, and where the first of them lies and stands."""

    step: Step
    ids: Sequence[Sequence[int]]
    keep: Sequence[int]
    slots: list[int]
    positions: list[int]


class GraphCache(Cache):
    """The first slots of a slab; it remembers what it was given last, so that no step is read back from the device.

    Its ``size_bytes`` are those of the slots asked for; the slab's spare one and those that round its size up are not counted.
    """

    slab: Slab
    given: Given | None = None

    def lie_in(self, slab: Slab) -> None:
        """Take the memory of ``slab`` for that which this was made with."""
        self.slab = slab
        for name in STORED:
            whole = getattr(slab.body, name)
            if whole is not None:
                setattr(self, name, whole[..., : self.capacity, :] if name in ("keys", "values") else whole[..., : self.capacity])

    def append(self, ids: Sequence[Sequence[int]], *, keep: Sequence[int]) -> Step:
        """As :meth:`Cache.append`."""
        slots, positions = list(self.counts), list(self.positions_next)
        step = super().append(ids, keep=keep)
        self.given = Given(step, ids, keep, slots, positions)
        return step


class GraphRunner:
    """Runs a decoder by graphs where a step has at most 16 tokens a row, and as ``runner`` does where it has more.

    There is one graph a cache and width. A row that reads fewer tokens than the widest, or none, has entries that are no tokens, whose results are dropped.

    Args:
        capture: what records a step, and ``name`` what it is called in :attr:`path`.
    """

    def __init__(self, runner: TorchRunner, *, capture: Capture = capture_cuda, name: str = "cuda graph") -> None:
        self.runner, self.shape, self.device, self.dtype = runner, runner.shape, runner.device, runner.dtype
        self.path = name + runner.path.removeprefix("torch")
        self._capture = capture
        self._idle: list[Slab] = []

    def cache(self, *, rows: int, capacity: int, format: str | None = None) -> GraphCache:
        """An empty cache. It takes up the memory and the graphs of one that was let go, where that had as many rows and nearly the capacity."""
        cache = GraphCache(self.shape, rows=rows, capacity=capacity, dtype=self.dtype, format=format, device="meta")
        size = (capacity // ROUND + 1) * ROUND
        slab = next((each for each in self._idle if (each.body.rows, each.body.capacity, each.body.format) == (rows, size, format)), None)
        if slab is None:
            slab = Slab(self.runner.cache(rows=rows, capacity=size, format=format))
        else:
            self._idle.remove(slab)
            for name in STORED:  # a number that is not finite would reach every text, though it is multiplied by 0
                if (tensor := getattr(slab.body, name)) is not None:
                    tensor.zero_()
        cache.lie_in(slab)
        weakref.finalize(cache, self._let_go, slab).atexit = False
        return cache

    def forward(self, cache: Cache, step: Step) -> Float[Tensor, "kept vocab"]:
        """As :class:`assay.ops.decode.runner.Runner` says."""
        given = cache.given if isinstance(cache, GraphCache) else None
        if given is None or given.step is not step or not 0 < max(map(len, given.ids)) <= WIDEST:
            return self.runner.forward(cache, step)
        assert isinstance(cache, GraphCache)
        width = max(map(len, given.ids))
        ids, slots, positions, kept = [], [], [], []
        for row, (new, keep, slot, position) in enumerate(zip(given.ids, given.keep, given.slots, given.positions, strict=True)):
            count, none = len(new), width - len(new)
            ids.append([*new, *[0] * none])
            slots.append([*range(slot, slot + count), *[cache.capacity] * none])
            positions.append([*range(position, position + count), *[0] * none])
            kept += range(row * width + count - keep, row * width + count)
        self._fill(cache.slab, [ids, slots, positions])
        logits = self._replay(cache.slab, width).flatten(0, 1)
        return logits.clone() if len(kept) == len(logits) else logits[self._there(kept)]

    def decode_greedy(
        self, cache: GraphCache, ids: Sequence[int | None], count: int, *, vocabulary: int | None = None
    ) -> Int[Tensor, "rows count"]:
        """Read a token of each row, then ``count`` - 1 times the likeliest that follows. The device waits for nothing that the host does, nor it for the device.

        Args:
            ids: the next token of each row, not read so far; None for a row that waits.
            vocabulary: ids from here on cannot come.
        Returns:
            The ``count`` tokens that follow, on the device, -1 for a row that waits. The last of a row is not read. Who looks at them waits for all.
        Raises:
            ValueError: not one id a row, no count, or a row without room. Nothing has changed then.
        """
        if len(ids) != cache.rows or count < 1:
            raise ValueError(
                f"{count} tokens after {len(ids)} ids in a cache of {cache.rows} rows; expected at least 1, and for each row an id or None"
            )
        going = [row for row, token in enumerate(ids) if token is not None]
        for row in going:
            if cache.counts[row] + count > cache.capacity:
                raise ValueError(
                    f"row {row} holds {cache.counts[row]} tokens and is to read {count} more, but its cache has room for {cache.capacity}; "
                    "ask for a larger capacity"
                )
        first = [[token or 0] for token in ids]
        slots, positions = ([[other] for _ in ids] for other in (cache.capacity, 0))
        for row in going:
            slots[row], positions[row] = [cache.counts[row]], [cache.positions_next[row]]
        inputs = self._fill(cache.slab, [first, slots, positions])
        going_there = self._there([[int(token is not None)] for token in ids])
        found = torch.empty(cache.rows, count, dtype=torch.int64, device=self.device)
        for index in range(count):
            inputs[0] = self._replay(cache.slab, 1)[:, :, :vocabulary].argmax(dim=-1)
            inputs[1:] += going_there
            found[:, index] = inputs[0, :, 0]
        for row in going:
            cache.counts[row] += count
            cache.positions_next[row] += count
        return torch.where(going_there > 0, found, -1)

    def _fill(self, slab: Slab, step: list[list[list[int]]]) -> Int[Tensor, "3 rows width"]:
        """Put ids, slots and positions into the static inputs of their width."""
        there = self._there(step)
        return slab.inputs.setdefault(there.shape[2], torch.empty_like(there)).copy_(there)

    def _replay(self, slab: Slab, width: int) -> Float[Tensor, "rows width vocab"]:
        """Run the step in the static inputs; the next of the same width overwrites what this returns."""
        if width not in slab.graphs:
            body, runner = slab.body, self.runner
            ids, slots, positions = slab.inputs[width]
            slab.graphs[width] = self._capture(lambda: runner.forward_static(body, ids, slots, positions), self.device)
        return slab.graphs[width]()

    def _there(self, numbers: Any) -> Int[Tensor, "..."]:
        """Numbers of the host on their way to the device: from pinned memory they are copied while the host goes on."""
        made = torch.tensor(numbers, dtype=torch.int64)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made.to(self.device)

    def _let_go(self, slab: Slab) -> None:
        self._idle = [slab, *self._idle][:IDLE]
