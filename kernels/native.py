"""The decoder on the CPU, one call a step: :class:`assay.ops.decode.forward.TorchRunner` again, faster. Not here: choosing it (``engine``).

Weights are read as they are stored and arithmetic is float32, so its logits are those of transformers in float32 within rounding, and a text's logits
have the same bits alone, in a batch, token by token or in chunks. Integer dot products (VNNI, AMX) would need the activations rounded as well, which is
another model; they are not used.
"""

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from assay.kernels.build import library
from assay.kernels.panels import FORMS, Panels, panels
from assay.ops.decode.architecture import Architecture
from assay.ops.decode.cache import Cache, Step
from assay.ops.decode.weights import Block, Matrix, Ready, Weights
from assay.ops.quantize.grid import Format, quantize
from assay.ops.quantize.hadamard import factor, factors

LEVELS = ("avx2", "avx512")
STORES = {None: 0, "fp8_e4m3": 1, "int8": 2}


class _Matrix(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("form", "rows", "cols", "group", "wide")] + [
        (n, c_void_p) for n in ("data", "scales", "zeros", "bias", "table")
    ]


class _Ready(ctypes.Structure):
    _fields_ = (
        [(name, c_int64) for name in ("left", "right", "stride")]
        + [(name, c_void_p) for name in ("left_matrix", "right_matrix")]
        + [(name, c_int64) for name in ("rounding", "bits", "symmetric", "fixed")]
        + [(name, c_float) for name in ("clip", "scale", "zero")]
    )


class _Block(ctypes.Structure):
    _fields_ = (
        [(name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")]
        + [(n, c_void_p) for n in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "after_attention_norm", "after_mlp_norm", "cosine", "sine")]
        + [("window", c_int64)]
        + [(name, _Ready) for name in ("before_qkv", "before_o", "before_gate", "before_down", "turned_heads")]
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        [(name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "gelu", "positions")]
        + [(name, c_float) for name in ("norm_eps", "norm_offset", "attention_scale", "embedding_scale")]
        + [("embedding", _Matrix), ("head", _Matrix), ("norm", c_void_p), ("blocks", POINTER(_Block))]
    )


class _Cache(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("store", "rows", "capacity")] + [
        (name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "positions")
    ]


class _Step(ctypes.Structure):
    _fields_ = [("tokens", c_int64), ("kept", c_int64)] + [(n, c_void_p) for n in ("ids", "rows", "slots", "positions", "keep", "logits")]


def levels() -> tuple[str, ...]:
    """The instruction sets that this machine runs and that multiply right, slowest first; none without the native library."""
    return tuple(level for level in LEVELS if _trusted(level))


@cache
def _trusted(level: str) -> bool:
    """Whether the processor has ``level``, and whether it multiplies small matrices of every form as torch does: nothing is timed that is wrong."""
    found = library()
    if found is None or not found.assay_levels() >> LEVELS.index(level) & 1:
        return False
    structures = (_Matrix, _Block, _Model, _Cache, _Step, _Ready)
    if [found.assay_sizes(which) for which in range(len(structures))] != [ctypes.sizeof(each) for each in structures]:
        return False
    random = torch.Generator().manual_seed(0)
    for form in FORMS:
        matrix = probe(form, rows=70, cols=64, group=16, generator=random)
        for tokens in (1, 2, 5):
            x = torch.randn(tokens, 64, generator=random)
            if not torch.allclose(multiply(panels(matrix), x, level=level), x @ matrix.dense(torch.float32).T, atol=1e-3, rtol=1e-3):
                return False
    return True


def probe(form: str, *, rows: int, cols: int, group: int, generator: torch.Generator) -> Matrix:
    """A random matrix of one form, to check a level with."""
    weight = torch.randn(rows, cols, generator=generator)
    if form in ("float32", "bfloat16"):
        return Matrix(weight.to(getattr(torch, form)))
    formats = {
        "int8": Format("int", 8, group),
        "int4": Format("int", 4, group, symmetric=False),
        "table4": Format("nf4", 4, group, scale="float32"),
        "e4m3": Format("e4m3", 8, group),
        "e5m2": Format("e5m2", 8, group),
    }
    return Matrix(quantize(weight, formats[form]))


def multiply(matrix: Panels, x: Float[Tensor, "tokens cols"], *, level: str, threads: int = 1) -> Float[Tensor, "tokens rows"]:
    """W x + b of each row of ``x``, in float32."""
    found, x = library(), x.float().contiguous()
    assert found is not None
    y = torch.empty(len(x), matrix.rows)
    found.assay_multiply(
        LEVELS.index(level), threads, ctypes.byref(_matrix(matrix)), c_void_p(x.data_ptr()), c_void_p(y.data_ptr()), c_int64(len(x))
    )
    return y


def make_ready(how: Ready, x: Float[Tensor, "tokens width"], *, level: str) -> Float[Tensor, "tokens width"]:
    """Each row of ``x`` turned and rounded as ``how`` says, in float32: what a step does before it multiplies."""
    library_, held, x = library(), [], x.float().clone().contiguous()
    assert library_ is not None
    library_.assay_ready(LEVELS.index(level), ctypes.byref(_ready(how, held)), c_void_p(x.data_ptr()), c_int64(len(x)), c_int64(x.shape[1]))
    return x


class NativeRunner:
    """Runs a decoder with one dense MLP a block, in float32 over the weights as they are stored.

    Args:
        threads: the most that work on a step; torch's own number when None.
        level: the instruction set, the best of :func:`levels` when None.
    Raises:
        ValueError: no native library, or a mixture of experts.
    """

    def __init__(self, shape: Architecture, weights: Weights, *, threads: int | None = None, level: str | None = None) -> None:
        known = levels()
        if shape.experts or not known or level not in (None, *known):
            raise ValueError(
                f"experts={shape.experts}, level={level} cannot run natively here; a dense MLP and one of {known or 'no level'} can"
            )
        self.shape, self.device = shape, torch.device("cpu")
        self._level = LEVELS.index(level or known[-1])
        self._threads = threads or torch.get_num_threads()
        self.has_threads = True
        self._held: list[Any] = []  # what the structures point to
        self._forms: dict[str, int] = {}
        self._blocks = (_Block * len(shape.layers))(*(self._block(block) for block in weights.blocks))
        embedding = self._matrix(weights.embedding)
        self._model = _Model(
            len(shape.layers), shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.activation == "gelu_tanh", 0,
            shape.norm_eps, shape.norm_offset, shape.attention_scale, shape.embedding_scale,
            embedding, embedding if weights.head is weights.embedding else self._matrix(weights.head), self._vector(weights.norm), self._blocks,
        )  # fmt: skip
        for block, layer in zip(self._blocks, shape.layers, strict=True):
            block.window = layer.window or 0
        forms = "+".join(sorted(self._forms, key=lambda form: -self._forms[form]))
        self.path = ", ".join((f"native {LEVELS[self._level]} float32", f"{forms} weights", *weights.inputs))

    def cache(self, *, rows: int, capacity: int, format: str | None = None) -> Cache:
        """An empty cache for this decoder."""
        if capacity > self._model.positions:
            self._rotations(capacity)
        return Cache(self.shape, rows=rows, capacity=capacity, dtype=torch.float32, format=format)

    def forward(self, cache: Cache, step: Step) -> Float[Tensor, "kept vocab"]:
        """Read the tokens of ``step`` into ``cache``; the logits of those to keep."""
        library_ = library()
        assert library_ is not None
        logits = torch.empty(len(step.keep), self.shape.vocabulary)
        if not len(step.ids):
            return logits
        if max(cache.positions_next) > self._model.positions:
            self._rotations(2 * max(cache.positions_next))
        held = _Cache(STORES[cache.format], cache.rows, cache.capacity, *(
            None if tensor is None else tensor.data_ptr()
            for tensor in (cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.positions)
        ))  # fmt: skip
        parts = (step.ids, step.rows, step.slots, step.positions, step.keep, logits)
        asked = _Step(len(step.ids), len(step.keep), *(part.data_ptr() for part in parts))
        library_.assay_forward(self._level, self._threads, ctypes.byref(self._model), ctypes.byref(held), ctypes.byref(asked))
        return logits

    def _block(self, block: Block) -> _Block:
        (mlp,) = block.mlps
        vectors = (block.attention_norm, block.mlp_norm, block.q_norm, block.k_norm, block.after_attention_norm, block.after_mlp_norm)
        return _Block(
            *(self._matrix(each) for each in (block.q, block.k, block.v, block.o, *mlp)), *map(self._vector, vectors), None, None, 0,
            *(_ready(how, self._held) for how in block.before),
        )  # fmt: skip

    def _vector(self, vector: Tensor | None) -> int | None:
        if vector is None:
            return None
        self._held.append(vector.float().contiguous())
        return self._held[-1].data_ptr()

    def _matrix(self, matrix: Matrix) -> _Matrix:
        laid = panels(matrix)
        self._held.append(laid)
        own = laid.form in (matrix.form, "table4", "e4m3", "e5m2")
        form = matrix.form if own else f"{laid.form} from {matrix.form}"
        self._forms[form] = self._forms.get(form, 0) + laid.rows * laid.cols
        return _matrix(laid)

    def _rotations(self, positions: int) -> None:
        """Cosines and sines of every position, as transformers computes them."""
        tables = []
        for rope in self.shape.ropes:
            angles = torch.arange(positions).float().unsqueeze(1) * rope.inverse_frequencies
            tables.append(((angles.cos() * rope.factor).contiguous(), (angles.sin() * rope.factor).contiguous()))
        self._tables = tables
        for block, layer in zip(self._blocks, self.shape.layers, strict=True):
            block.cosine, block.sine = (table.data_ptr() for table in tables[layer.rope])
        self._model.positions = positions


def _matrix(laid: Panels) -> _Matrix:
    pointers = (None if part is None else part.data_ptr() for part in (laid.data, laid.scales, laid.zeros, laid.bias, laid.table))
    wide = laid.scales is not None and laid.scales.dtype == torch.float32
    return _Matrix(FORMS[laid.form], laid.rows, laid.cols, laid.group, wide, *pointers)


def _ready(how: Ready, held: list[Any]) -> _Ready:
    """``how`` for the library; ``held`` keeps what it points to."""
    found, online, rounded = _Ready(), how.online, how.activations
    if online is not None:
        left, right = factors(online.size) if online.stride == 1 else (online.size, 1)
        matrices = [factor(order, torch.float32, torch.device("cpu")).contiguous() for order in (left, right)]
        held += matrices
        found.left, found.right, found.stride = left, right, online.stride
        found.left_matrix, found.right_matrix = (matrix.data_ptr() for matrix in matrices)
    if rounded is not None:
        found.rounding, found.bits = (2, 8) if rounded.format == "fp8_e4m3" else (1, int(rounded.format.removeprefix("int")))
        found.symmetric, found.fixed, found.clip = rounded.symmetric, rounded.per == "tensor", rounded.clip
        found.scale = 0.0 if rounded.scale is None else float(rounded.scale)
        found.zero = 0.0 if rounded.zero is None else float(rounded.zero)
    return found
