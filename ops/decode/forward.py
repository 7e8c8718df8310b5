"""A decoder as plain functions over tensors: the definition that faster runners are held to, and the fallback on any device.

Every family of ``architecture`` computes as its transformers model does, dtype for dtype. Not here: what a decoder is made of (``architecture``,
``weights``), what is stored between steps (``cache``), or any loop over steps (``session``).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay.ops.decode.architecture import Architecture, Rope
from assay.ops.decode.cache import Cache, Step
from assay.ops.decode.weights import Before, Block, Matrix, Mlp, Ready, Weights
from assay.ops.quantize.grid import Quantized, dequantize, moved, rows_of

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, queries, keys, values) → what each token attended to
Hold = Callable[[Matrix, torch.dtype, torch.device], Any]  # a packed matrix → what a kernel multiplies: shape, form, multiply(values)
Prepare = Callable[[Ready, Sequence[Any], torch.device], Any]  # the same for what is done to an input, given the matrices that read it
Coded = Any  # what that may make of an input, for matrices that are held


class Turn(NamedTuple):
    """Cosine and sine by which each token's heads are rotated; they broadcast over heads."""

    cosine: Float[Tensor, "tokens 1 dim"]
    sine: Float[Tensor, "tokens 1 dim"]


class Layout(NamedTuple):
    """The tokens of a step, padded to the same number ``size[1]`` for each of the ``size[0]`` rows that read any.

    ``rows`` are those rows, or None for all in order; ``places`` is where each token lies in the flattened table, or None where the tokens are the table.
    ``masks`` say, by window, which of the first ``used`` slots each entry attends to; None is all of them.
    """

    rows: Int[Tensor, " readers"] | None
    size: tuple[int, int]
    places: Int[Tensor, " tokens"] | None
    used: int
    masks: dict[int | None, Bool[Tensor, "readers 1 width slots"] | None]


class TorchRunner:
    """Runs a decoder in torch.

    Args:
        dtype: of weights and activations in memory; packed weights are multiplied out once. Norms and softmax are float32 inside.
        hold: how a packed matrix is kept instead, for a kernel that multiplies it as it is (see :func:`linear`).
        prepare: :func:`on_device`, or kernels for it.
        norm: :func:`rms_norm`, or a kernel of its signature.
    """

    def __init__(
        self,
        shape: Architecture,
        weights: Weights,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        hold: Hold | None = None,
        prepare: Prepare | None = None,
        norm: Callable[..., Tensor] | None = None,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        said = str(dtype).removeprefix("torch.")
        self.weights, self._rms_norm = _in_memory(weights, dtype, self.device, hold, prepare or on_device), norm or rms_norm
        forms = (weights if hold is None else self.weights).forms
        self.path = ", ".join((f"torch {said}", *([f"{forms} weights"] if forms != said else []), *self.weights.inputs))
        self.ropes = tuple(Rope(rope.inverse_frequencies.to(self.device), rope.factor) for rope in shape.ropes)
        self.windows = tuple(dict.fromkeys(layer.window for layer in shape.layers))
        # transformers keeps Gemma's factor as a tensor of the model's dtype: in bfloat16 it is a rounded one.
        self.embedding_scale = float(torch.tensor(shape.embedding_scale, dtype=dtype))

    def cache(self, *, rows: int, capacity: int, format: str | None = None) -> Cache:
        return Cache(self.shape, rows=rows, capacity=capacity, dtype=self.dtype, format=format, device=self.device)

    @torch.no_grad()
    def forward(self, cache: Cache, step: Step) -> Float[Tensor, "kept vocab"]:
        """As :class:`assay.ops.decode.runner.Runner` says; rows that read nothing cost nothing."""
        layout = arrange(cache, step, self.windows)

        def attend(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(index, step, keys, values)
            window = self.shape.layers[index].window
            stored = cache.read(index, layout.used, layout.rows)
            return attend_in_layout(queries, *stored, layout, window=window, scale=self.shape.attention_scale)

        hidden = self._blocks(step.ids, step.positions, attend, every_expert=False)
        return self._head(hidden[step.keep])

    @torch.no_grad()
    def forward_static(
        self,
        cache: Cache,
        ids: Int[Tensor, "rows width"],
        slots: Int[Tensor, "rows width"],
        positions: Int[Tensor, "rows width"],
    ) -> Float[Tensor, "rows width vocab"]:
        """:meth:`forward` of ``width`` tokens in every row, with nothing that depends on a value of a tensor: a CUDA graph can hold it.

        It attends over the whole capacity, writes ``cache.positions`` itself, and leaves the cache's counts to the caller. A row that reads fewer
        tokens, or none, is given any ids, at slots that hold no token of its text; what it returns for them is finite and means nothing.

        Args:
            slots: int64, each below the capacity, ascending in a row; the caller has seen to it, for nothing is checked here.
            positions: of the tokens in their texts.
        """
        rows, width = ids.shape
        row_of = torch.arange(rows, device=ids.device).repeat_interleave(width)
        step = Step(ids.flatten(), row_of, slots.flatten(), positions.flatten(), row_of[:0])
        cache.positions[row_of, step.slots] = step.positions.to(cache.positions.dtype)
        masks = {window: visible(slots, positions, cache.positions, window=window).unsqueeze(1) for window in self.windows}
        layout = Layout(None, (rows, width), None, cache.capacity, dict(masks))

        def attend(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(index, step, keys, values)
            window = self.shape.layers[index].window
            return attend_in_layout(queries, *cache.read(index, cache.capacity), layout, window=window, scale=self.shape.attention_scale)

        hidden = self._blocks(step.ids, step.positions, attend, every_expert=True)
        return self._head(hidden).view(rows, width, -1)

    def _blocks(self, ids: Tensor, positions: Tensor, attend: Attend, *, every_expert: bool) -> Float[Tensor, "tokens hidden"]:
        shape = self.shape
        hidden = embed(self.weights.embedding, ids, self.dtype)
        if shape.embedding_scale != 1:
            hidden = hidden * self.embedding_scale
        turns = [turn(rope, positions, self.dtype) for rope in self.ropes]
        for index, (layer, block) in enumerate(zip(shape.layers, self.weights.blocks, strict=True)):
            before = block.before
            normed = before.qkv(self._norm(hidden, block.attention_norm))
            queries, keys, values = (linear(normed, matrix).view(len(ids), -1, shape.head_dim) for matrix in (block.q, block.k, block.v))
            if block.q_norm is not None and block.k_norm is not None:
                queries, keys = self._norm(queries, block.q_norm), self._norm(keys, block.k_norm)
            queries, keys = before.heads(rotate(queries, turns[layer.rope])), before.heads(rotate(keys, turns[layer.rope]))
            found = linear(before.o(attend(index, queries, keys, values)), block.o)
            hidden = hidden + (found if block.after_attention_norm is None else self._norm(found, block.after_attention_norm))
            normed = before.gate(self._norm(hidden, block.mlp_norm))
            if block.router is None:
                found = mlp(normed, block.mlps[0], shape.activation, before.down)
            else:
                found = mixture(
                    normed, block.router, block.mlps, chosen=shape.experts_per_token, activation=shape.activation, every=every_expert
                )
            hidden = hidden + (found if block.after_mlp_norm is None else self._norm(found, block.after_mlp_norm))
        return hidden

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        return self._rms_norm(values, weight, eps=self.shape.norm_eps, offset=self.shape.norm_offset)

    def _head(self, hidden: Tensor) -> Tensor:
        return linear(self._norm(hidden, self.weights.norm), self.weights.head).float()


def linear(values: Float[Tensor, "*batch inputs"] | Coded, matrix: Matrix) -> Float[Tensor, "*batch outputs"]:
    """W x + b of a dense matrix, or of one that is held for a kernel, which multiplies by itself."""
    if not isinstance(matrix, Matrix):
        return matrix.multiply(values)
    assert isinstance(matrix.weight, Tensor)
    return F.linear(values, matrix.weight, matrix.bias)


def embed(matrix: Matrix, ids: Int[Tensor, " tokens"], dtype: torch.dtype) -> Float[Tensor, "tokens hidden"]:
    """The rows of the embedding; of a packed one, those asked for are multiplied out."""
    if not isinstance(matrix.weight, Quantized):
        assert isinstance(matrix.weight, Tensor)
        return F.embedding(ids, matrix.weight).to(dtype)
    return dequantize(rows_of(matrix.weight, ids)).to(dtype)


def rms_norm(values: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], *, eps: float, offset: float) -> Tensor:
    """x / √(mean x² + ε), times the weight. With an ``offset`` (Gemma's 1) it is offset + weight, multiplied before rounding to the dtype of ``values``.

    Source:
        Zhang and Sennrich 2019, equation 4, arXiv:1910.07467; the two orders of rounding are those of transformers.
    """
    exact = values.float()
    exact = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
    if offset:
        return (exact * (offset + weight.float())).to(values.dtype)
    return weight * exact.to(values.dtype)


def turn(rope: Rope, positions: Int[Tensor, " tokens"], dtype: torch.dtype) -> Turn:
    """How tokens at ``positions`` are rotated; angles are float32 whatever the dtype."""
    angles = positions.float().unsqueeze(-1) * rope.inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return Turn((angles.cos() * rope.factor).to(dtype), (angles.sin() * rope.factor).to(dtype))


def rotate(values: Float[Tensor, "tokens heads dim"], by: Turn) -> Float[Tensor, "tokens heads dim"]:
    """Rotate each pair (i, i + dim/2) of channels.

    Source:
        Su et al. 2021, §3.4, arXiv:2104.09864, with the pairing of transformers.
    """
    first, second = values.chunk(2, dim=-1)
    return values * by.cosine + torch.cat((-second, first), dim=-1) * by.sine


def mlp(
    values: Float[Tensor, "tokens hidden"] | Coded, weights: Mlp, activation: str, before_down: Callable[[Tensor], Any] | None = None
) -> Float[Tensor, "tokens hidden"]:
    """down(activation(gate x) · up x), with something done first to what ``down`` reads."""
    gate = linear(values, weights.gate)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    inner = gate * linear(values, weights.up)
    return linear(inner if before_down is None else before_down(inner), weights.down)


def mixture(
    values: Float[Tensor, "tokens hidden"],
    router: Float[Tensor, "experts hidden"],
    experts: Sequence[Mlp],
    *,
    chosen: int,
    activation: str,
    every: bool,
) -> Float[Tensor, "tokens hidden"]:
    """The ``chosen`` experts that the router finds likeliest, weighted by their probabilities among each other.

    Args:
        every: run every expert on every token, those not chosen with weight 0: the shapes then depend on no value.
    Source:
        Jiang et al. 2024, §2.1, arXiv:2401.04088.
    """
    shares, names = F.linear(values, router).float().softmax(dim=-1).topk(chosen, dim=-1)
    shares = shares / shares.sum(dim=-1, keepdim=True)
    total = torch.zeros_like(values)
    for index, expert in enumerate(experts):
        share = (shares * (names == index)).sum(dim=-1, keepdim=True)
        if every:
            total += (mlp(values, expert, activation) * share).to(values.dtype)
            continue
        tokens = (names == index).any(dim=-1).nonzero().squeeze(-1)
        if len(tokens):
            total[tokens] += (mlp(values[tokens], expert, activation) * share[tokens]).to(values.dtype)
    return total


def visible(
    slots: Int[Tensor, "readers width"],
    positions: Int[Tensor, "readers width"],
    stored: Int[Tensor, "readers used"],
    *,
    window: int | None,
) -> Bool[Tensor, "readers width used"]:
    """Which stored tokens each query attends to: those of no later slot, and less than ``window`` positions back.

    A slot that holds nothing, or what was taken back, is a later one.

    Args:
        stored: the positions of the tokens in the slots.
    """
    allowed = torch.arange(stored.shape[1], device=slots.device) <= slots.unsqueeze(-1)
    if window is not None:
        allowed = allowed & (positions.unsqueeze(-1) - stored.unsqueeze(1) < window)
    return allowed


def arrange(cache: Cache, step: Step, windows: Sequence[int | None]) -> Layout:
    """Lay the tokens of ``step`` out in a table of rows, and find what each may attend to."""
    rows, slots, positions = step.rows.tolist(), step.slots.tolist(), step.positions.tolist()
    readers = list(dict.fromkeys(rows))
    first: dict[int, int] = {}
    counts = dict.fromkeys(readers, 0)
    for row, slot in zip(rows, slots, strict=True):
        first.setdefault(row, slot)
        counts[row] += 1
    width, used = max(counts.values()), max(slots) + 1
    start = {row: index * width - first[row] for index, row in enumerate(readers)}
    places = [start[row] + slot for row, slot in zip(rows, slots, strict=True)]
    whole = places == list(range(len(readers) * width))
    device = step.ids.device
    at = None if whole else torch.tensor(places, device=device)
    which = None if readers == list(range(cache.rows)) else torch.tensor(readers, device=device)

    def table(values: Tensor) -> Tensor:
        """[readers, width], 0 where a row has no token: such an entry attends to the first slot, which is taken, and is read by no one."""
        if at is None:
            return values.view(len(readers), width)
        return values.new_zeros(len(readers) * width).index_put_((at,), values).view(len(readers), width)

    masks: dict[int | None, Tensor | None] = {}
    for window in windows:
        if min(slots) == used - 1 and (
            window is None or max(positions) < window
        ):  # one token a row, all of the same length, all in the window
            masks[window] = None
            continue
        stored = cache.positions[:, :used] if which is None else cache.positions[which, :used]
        masks[window] = visible(table(step.slots), table(step.positions), stored, window=window).unsqueeze(1)
    return Layout(which, (len(readers), width), at, used, masks)


def attend_in_layout(
    queries: Float[Tensor, "tokens heads dim"],
    keys: Float[Tensor, "readers kv_heads used dim"],
    values: Float[Tensor, "readers kv_heads used dim"],
    layout: Layout,
    *,
    window: int | None,
    scale: float,
) -> Float[Tensor, "tokens width"]:
    """softmax(scale · q kᵀ) v over the slots that the layout shows, query heads sharing key-value heads in order.

    Source:
        Ainslie et al. 2023, arXiv:2305.13245.
    """
    readers, width = layout.size
    heads, dim = queries.shape[1:]
    table = queries
    if layout.places is not None:
        table = queries.new_zeros(readers * width, heads, dim).index_put_((layout.places,), queries)
    found = F.scaled_dot_product_attention(
        table.view(readers, width, heads, dim).transpose(1, 2), keys, values, attn_mask=layout.masks[window], scale=scale,
        enable_gqa=heads != keys.shape[1],
    )  # fmt: skip
    found = found.transpose(1, 2).reshape(readers * width, heads * dim)
    return found if layout.places is None else found[layout.places]


def on_device(ready: Ready, readers: Sequence[Any], device: torch.device) -> Ready:
    """``ready`` with its scales on ``device``; who reads what it makes does not matter."""
    how = ready.activations
    if how is None:
        return ready
    scale, zero = (None if each is None else each.to(device) for each in (how.scale, how.zero))
    return ready._replace(activations=how._replace(scale=scale, zero=zero))


def _in_memory(weights: Weights, dtype: torch.dtype, device: torch.device, hold: Hold | None, prepare: Prepare) -> Weights:
    """Dense, in ``dtype`` and on ``device``; a tensor that is so already is shared. A packed embedding that is not a dense head stays packed."""

    def vector(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device=device, dtype=dtype)

    def matrix(stored: Matrix) -> Any:
        if hold is not None and not isinstance(stored.weight, Tensor):
            return hold(stored, dtype, device)
        return Matrix(stored.dense(dtype).to(device), vector(stored.bias))

    def block(stored: Block) -> Block:
        changed: dict[str, Any] = {
            name: matrix(part) if isinstance(part, Matrix) else vector(part)
            for name, part in stored._asdict().items()
            if name not in ("mlps", "before")
        }
        mlps = tuple(Mlp(*map(matrix, each)) for each in stored.mlps)
        readers = (
            [changed[name] for name in "qkv"], [changed["o"]], [part for each in mlps for part in (each.gate, each.up)], [each.down for each in mlps], [],
        )  # fmt: skip
        before = Before(*(prepare(how, reading, device) for how, reading in zip(stored.before, readers, strict=True)))
        return Block(**changed, mlps=mlps, before=before)

    head = matrix(weights.head)
    embedding = weights.embedding
    whole = getattr(head, "weight", None)  # of a head that is held multiplied out too
    if embedding is weights.head and isinstance(whole, Tensor):
        embedding = Matrix(whole, head.bias)
    elif isinstance(embedding.weight, Quantized):
        embedding = embedding._replace(weight=moved(embedding.weight, device))
    else:
        embedding = Matrix(embedding.dense(dtype).to(device), vector(embedding.bias))
    norm = vector(weights.norm)
    assert norm is not None
    return Weights(embedding, tuple(block(each) for each in weights.blocks), norm, head)
