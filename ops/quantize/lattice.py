"""Eight weights to a 16-bit code, which names a point of the lattice E8: two bits a weight, after Hadamard transforms that make them look Gaussian.

Not here: codebooks that are learned (``additive.py``), or scalar formats (``grid.py``).
"""

from functools import cache
from itertools import combinations
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int8, Int16, UInt8
from torch import Tensor

from assay.ops.quantize import hadamard

SIZE = 8  # weights a code
SPREAD = 1.03  # standard deviation of weights in units of the lattice that loses least
IRREGULAR = 29  # patterns that fill 227 up to 256
CHUNK = 2**12  # vectors at a time


class Lattice(NamedTuple):
    """A weight in two bits each: what is stored of it.

    ``signs`` are those of the transforms along rows and columns, a bit each: 1 is minus.
    """

    codes: Int16[Tensor, "rows groups"]
    scale: Float[Tensor, " one"]
    row_signs: UInt8[Tensor, " row_bytes"]
    col_signs: UInt8[Tensor, " col_bytes"]

    @property
    def shape(self) -> tuple[int, int]:
        rows, groups = self.codes.shape
        return rows, groups * SIZE

    @property
    def form(self) -> str:
        """How it is stored, in a word."""
        return "e8"

    def dense(self) -> Float[Tensor, "rows cols"]:
        """The whole weight in float32."""
        rows, groups = self.codes.shape
        turned = decode(self.codes) * self.scale
        turned = hadamard.inverse(turned, signs=unpack_signs(self.col_signs, groups * SIZE))
        return hadamard.inverse(turned.T, signs=unpack_signs(self.row_signs, rows)).T

    @property
    def bits(self) -> float:
        """Stored bits a weight, all included."""
        return 8 * sum(part.nbytes for part in self) / (self.codes.numel() * SIZE)


def quantize(
    weight: Float[Tensor, "rows cols"], *, seed: int = 0, hessian: Float[Tensor, "cols cols"] | None = None, damping: float = 0.01
) -> Lattice:
    """Turn both sides of a weight by Hadamard transforms with random signs, and round each eight columns of a row to the nearest of 2^16 points.

    With Ŵ the rounded weight, H the Hessian in the turned basis and H = (I + U) D (I + U)ᵀ, U strictly upper in blocks of eight columns, block k is

        Ŵ_k = round(W_k + Σ_{j<k} (W_j - Ŵ_j) U_jk)        (LDLQ; without a Hessian U = 0)

    Args:
        hessian: Xᵀ X of the inputs, up to a factor; positive semidefinite.
        damping: share of its mean diagonal that is added to it.
    Raises:
        ValueError: columns that eight does not divide, a size without a Hadamard matrix, weights that are not finite, or a Hessian of zeros.
    Source:
        Tseng et al. 2024 (QuIP#), §3-4, arXiv:2402.04396. The 29 patterns of norm 12 are others (see :func:`patterns`), so that codes are not theirs; the
        scale is fitted by least squares (under H) after rounding; no fine-tuning.
    """
    rows, cols = weight.shape
    require_fit(rows, cols)
    if not weight.isfinite().all():
        raise ValueError(
            f"{int((~weight.isfinite()).sum()):,} of {weight.numel():,} weights are NaN or infinite; finite ones can be rounded"
        )
    row_signs, col_signs = (hadamard.random_signs(size, 2 * seed + side).to(weight.device) for side, size in enumerate((rows, cols)))
    turned = hadamard.transform(weight.float(), signs=col_signs)
    turned = hadamard.transform(turned.T, signs=row_signs).T.contiguous()
    scale = (turned.square().mean().sqrt() / SPREAD).clamp(min=torch.finfo(torch.float32).tiny)
    if hessian is None:
        codes = encode(turned / scale)
        points = weighted = decode(codes)
    else:
        turned_hessian = _turned_hessian(hessian, col_signs)
        codes = _feed_back(turned / scale, feedback(turned_hessian, damping=damping))
        points = decode(codes)
        weighted = points @ turned_hessian.float()
    fitted = (turned * weighted).double().sum() / (points * weighted).double().sum()
    return Lattice(codes, fitted.float().reshape(1), pack_signs(row_signs), pack_signs(col_signs))


def require_fit(rows: int, cols: int) -> None:
    """Refuse the shape of a weight.

    Raises:
        ValueError: columns that eight does not divide, or a size without a Hadamard matrix.
    """
    if cols % SIZE:
        raise ValueError(
            f"a code is of {SIZE} weights, which does not divide the {cols} columns of the weight; a multiple of {SIZE} columns works"
        )
    for size in (rows, cols):
        hadamard.core(size)


@cache
def patterns() -> Float[Tensor, "256 8"]:
    """The absolute values of the points: eight halves of odd numbers. All 227 of squared norm up to 10, and 29 of 12.

    Those of norm 12 with five 3/2 are 56, in the order of their places; evenly spaced ones are taken, so that no coordinate is favoured.
    """
    found = []
    for fives in (0, 1):
        for threes in range(5 if not fives else 2):
            for five in combinations(range(SIZE), fives):
                rest = [place for place in range(SIZE) if place not in five]
                found += [_pattern(five, three) for three in combinations(rest, threes)]
    outer = list(combinations(range(SIZE), 5))
    found += [_pattern((), outer[index * len(outer) // IRREGULAR]) for index in range(IRREGULAR)]
    return torch.tensor(found)


@cache
def codebook() -> Float[Tensor, "65536 8"]:
    """The point of each code, as an unsigned number: bits 8 to 15 its pattern, 1 to 7 the signs of the first seven (1: minus), 0 the shift.

    The sign of the eighth makes the sum of the signed pattern even; then ¼ is taken from every coordinate, or added if the shift is 1.
    """
    codes = torch.arange(2**16)
    sizes = patterns()[codes >> 8]
    negative = (codes[:, None] >> torch.arange(1, SIZE)) & 1
    last = (negative.sum(dim=1) + sizes.sum(dim=1).long()) % 2
    signs = 1 - 2 * torch.cat((negative, last[:, None]), dim=1)
    return sizes * signs + ((codes & 1) / 2 - 0.25)[:, None]


def decode(codes: Int16[Tensor, "rows groups"]) -> Float[Tensor, "rows cols"]:
    """The points of the codes, side by side."""
    return codebook().to(codes.device)[codes.long() & 0xFFFF].reshape(len(codes), -1)


def encode(values: Float[Tensor, "rows cols"]) -> Int16[Tensor, "rows groups"]:
    """The code of the nearest point, exactly, of each eight numbers.

    Without the shift, the nearest signed pattern to u has the signs of u, but for one where the sum would be odd: that of the least \\|u\\|·pattern, at a cost
    of four times that. Patterns of norm up to 10 come in every order, so that the best of a kind lies as \\|u\\| does, and its flip costs 2 min\\|u\\|.
    """
    vectors = values.float().reshape(-1, SIZE)
    codes = [_encode(part) for part in vectors.split(CHUNK)]
    return torch.cat(codes).reshape(len(values), -1) if codes else torch.empty(len(values), values.shape[1] // SIZE, dtype=torch.int16)


def feedback(hessian: Float[Tensor, "cols cols"], *, damping: float) -> Float[Tensor, "cols cols"]:
    """U of H = (I + U) D (I + U)ᵀ, strictly upper in blocks of eight, of H with ``damping`` times its mean diagonal added.

    Raises:
        ValueError: no input was seen, or H is not positive semidefinite.
    """
    exact = hessian.double()
    mean = exact.diagonal().mean()
    if not mean > 0 or not exact.isfinite().all():
        raise ValueError("the Hessian is zero or not finite: no input was seen; gather it over at least one token")
    exact = exact + damping * mean * torch.eye(len(exact), dtype=torch.float64, device=exact.device)
    lower, failed = torch.linalg.cholesky_ex(exact.flip(0, 1))
    if failed:
        raise ValueError(f"the Hessian with damping={damping} is not positive definite; a sum of products Xᵀ X, or more damping, works")
    upper = lower.flip(0, 1)  # H = upper · upperᵀ
    blocks = upper.view(len(upper) // SIZE, SIZE, -1, SIZE)
    diagonal = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    inverse = torch.linalg.inv(diagonal)
    unit = torch.einsum("xij,ijk->xik", upper.view(len(upper), -1, SIZE), inverse).reshape(upper.shape)
    return (unit - torch.eye(len(unit), dtype=torch.float64, device=unit.device)).float()


def pack_signs(signs: Int8[Tensor, " size"]) -> UInt8[Tensor, " bytes"]:
    """A bit a sign, the first the lowest of its byte; minus is 1."""
    bits = torch.nn.functional.pad((signs < 0).to(torch.uint8), (0, -len(signs) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def unpack_signs(packed: UInt8[Tensor, " bytes"], size: int) -> Int8[Tensor, " size"]:
    """The first ``size`` signs again."""
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return 1 - 2 * bits.flatten()[:size].to(torch.int8)


@cache
def _kinds() -> tuple[Tensor, Tensor, Tensor]:
    """Patterns of norm up to 10, descending, one of each kind [7, 8]; the 29 others [29, 8]; and the place of a pattern by its digits to base 3."""
    regular = torch.tensor(
        [_pattern((), range(threes)) for threes in range(5)] + [_pattern((0,), range(1, 1 + threes)) for threes in range(2)]
    )
    places = torch.full((3**SIZE,), -1)
    places[_digits(patterns())] = torch.arange(256)
    return regular, patterns()[-IRREGULAR:], places


def _encode(vectors: Float[Tensor, "n 8"]) -> Int16[Tensor, " n"]:
    regular, irregular, places = (each.to(vectors.device) for each in _kinds())
    shifted = torch.stack((vectors + 0.25, vectors - 0.25))  # a code of shift 0 is a point less ¼
    negative, sizes = shifted < 0, shifted.abs()
    odd = negative.sum(dim=-1) % 2
    ordered, order = sizes.sort(dim=-1, descending=True)
    # Scores: what the squared distance is less than |u|².
    flip = (odd[..., None] + regular.sum(dim=1).long()) % 2
    scores = 2 * ordered @ regular.T - regular.square().sum(dim=1) - 2 * flip * ordered[..., -1:]
    others = 2 * sizes @ irregular.T - 12
    even = odd == 0  # five 3/2 and three 1/2 add up to 9
    others[even] -= 4 * (sizes[even][:, None] * irregular).amin(dim=-1)
    best, kind = torch.cat((scores, others), dim=-1).max(dim=-1)
    distances = shifted.square().sum(dim=-1) - best
    shift = (distances[1] < distances[0]).long()
    kind, order, negative, sizes, odd = (_pick(each, shift) for each in (kind, order, negative, sizes, odd))
    chosen = torch.empty_like(sizes).scatter_(1, order, torch.cat((regular, irregular))[kind])
    chosen = torch.where((kind >= len(regular))[:, None], torch.cat((regular, irregular))[kind], chosen)
    wrong = ((odd + chosen.sum(dim=1).long()) % 2).bool()
    least = (sizes * chosen).argmin(dim=1, keepdim=True)
    negative = negative.scatter(1, least, negative.gather(1, least) ^ wrong[:, None])
    bits = (negative[:, :-1].long() << torch.arange(1, SIZE, device=vectors.device)).sum(dim=1)
    return ((places[_digits(chosen)] << 8) + bits + shift).to(torch.int32).to(torch.int16)


def _pick(both: Tensor, which: Int[Tensor, " n"]) -> Tensor:
    return both[which, torch.arange(len(which), device=which.device)]


def _pattern(five: tuple[int, ...], threes: range | tuple[int, ...]) -> list[float]:
    return [2.5 if place in five else 1.5 if place in threes else 0.5 for place in range(SIZE)]


def _digits(sizes: Float[Tensor, "n 8"]) -> Int[Tensor, " n"]:
    return ((sizes - 0.5).long() * 3 ** torch.arange(SIZE, device=sizes.device)).sum(dim=-1)


def _turned_hessian(hessian: Float[Tensor, "cols cols"], signs: Int8[Tensor, " cols"]) -> Float[Tensor, "cols cols"]:
    half = hadamard.transform(hessian.double(), signs=signs)
    return hadamard.transform(half.T, signs=signs)


def _feed_back(values: Float[Tensor, "rows cols"], upper: Float[Tensor, "cols cols"]) -> Int16[Tensor, "rows groups"]:
    errors, codes = torch.zeros_like(values), []
    for at in range(0, values.shape[1], SIZE):
        block = values[:, at : at + SIZE]
        codes.append(encode(block + errors[:, :at] @ upper[:at, at : at + SIZE]))
        errors[:, at : at + SIZE] = block - decode(codes[-1])
    return torch.cat(codes, dim=1)
