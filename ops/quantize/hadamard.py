"""Orthogonal transforms that spread outliers: the normalised Hadamard transform of any size that has one here, random signs, random rotations.

The matrix of size m · 2^a is Paley's of order m, m as small as possible, times Sylvester's of order 2^a. All of them are symmetric, so that each transform
is its own inverse. Not here: which weights of a model are turned (``rotate.py``), learning a rotation (``spin.py``), or the Triton kernel
(``kernels/triton_hadamard.py``).
"""

from functools import cache
from itertools import product
from math import isqrt, sqrt

import torch
from jaxtyping import Float, Int8, Shaped
from torch import Tensor


def transform(
    x: Float[Tensor, "*batch size"], *, signs: Shaped[Tensor, " size"] | None = None, block: int | None = None
) -> Float[Tensor, "*batch size"]:
    """Turn the last dimension: x · diag(signs) · H / √size, as two products with small matrices, H being a Kronecker product.

    Lengths and inner products stay as they are: with x and the rows of a weight turned alike, x Wᵀ is the same.

    Args:
        x: 16-bit input is turned in float32 and rounded once; float64 stays.
        signs: ±1 of each channel, such as of :func:`random_signs`; all 1 when None.
        block: turn each run of this many channels by itself. For sizes that have no matrix; mixes less, so it is never chosen silently.
    Raises:
        ValueError: the size (or block) has no Hadamard matrix here, or the block does not divide the size; says what would work.
    """
    if signs is not None:
        x = x * signs.to(x)
    return _turn(x, block)


def inverse(
    x: Float[Tensor, "*batch size"], *, signs: Shaped[Tensor, " size"] | None = None, block: int | None = None
) -> Float[Tensor, "*batch size"]:
    """Undo :func:`transform` with the same ``signs`` and ``block``."""
    x = _turn(x, block)
    return x if signs is None else x * signs.to(x)


def hadamard(size: int) -> Float[Tensor, "size size"]:
    """The normalised matrix itself, float64: symmetric, orthogonal, every entry ±1/√size.

    Raises:
        ValueError: there is none of this size here.
    """
    return torch.kron(paley(core(size)).double(), sylvester(size // core(size)).double()) / sqrt(size)


def random_signs(size: int, seed: int) -> Int8[Tensor, " size"]:
    """±1, each with probability one half, the same for the same seed."""
    return (torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)) * 2 - 1).to(torch.int8)


def random_orthogonal(size: int, seed: int) -> Float[Tensor, "size size"]:
    """An orthogonal matrix drawn uniformly (Haar), float64.

    Source:
        Mezzadri 2007, §5, arXiv:math-ph/0609050: the Q of a Gaussian matrix, its columns signed so that R has a positive diagonal.
    """
    gaussian = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


def has_matrix(size: int) -> bool:
    """Whether a Hadamard matrix of this size is known here."""
    return size >= 1 and _core(size) is not None


def core(size: int) -> int:
    """The order m of Paley's factor of ``size`` = m · 2^a, as small as possible; 1 for a power of two.

    Raises:
        ValueError: there is none. Names sizes nearby that have one, and the largest block that does.
    """
    found = _core(size) if size >= 1 else None
    if found is None:
        below = next((n for n in range(size - 1, 0, -1) if has_matrix(n)), 1)
        above = next(n for n in range(max(size, 0) + 1, 2 * max(size, 1) + 1) if has_matrix(n))
        block = next((n for n in range(size - 1, 1, -1) if size % n == 0 and has_matrix(n)), None)
        raise ValueError(
            f"no Hadamard matrix of size {size} is known here, and one cut from a larger size would not be orthogonal; {below} and {above} have "
            f"one, as has m · 2^a where m - 1, or m / 2 - 1, is a prime power (3 or 1 above a multiple of 4). "
            + (f"block={block} turns parts of {block} by themselves, and a" if block else "A")
            + " random rotation has any size"
        )
    return found


@cache
def paley(order: int) -> Int8[Tensor, "order order"]:
    """Paley's symmetric Hadamard matrix of ±1: with χ the quadratic character of the field of q elements,

        q = order - 1, 3 above a multiple of 4 (first construction): a row and column of ones about -χ(i + j), with -1 where i + j = 0
        q = order / 2 - 1, 1 above a multiple of 4 (second): C ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]], C the border of ones about χ(i - j)

    Source:
        Paley 1933. The first is reflected (χ(i + j) for χ(i - j)), which makes it symmetric too.
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    if _is_field(order - 1) and order % 4 == 0:
        character, sums = _field(order - 1)
        inner = -(character[sums] + (sums == 0).to(torch.int8))
        return torch.nn.functional.pad(inner, (1, 0, 1, 0), value=1)
    if order % 4 or not _is_field(order // 2 - 1) or order // 2 % 4 != 2:
        raise ValueError(f"neither construction of Paley has the order {order}; order - 1 or order / 2 - 1 has to be a fitting prime power")
    character, sums = _field(order // 2 - 1)
    negative = (sums == 0).int().argmax(dim=1)  # of each element: what added to it gives 0
    conference = torch.nn.functional.pad(character[sums[:, negative]], (1, 0, 1, 0), value=1)
    conference[0, 0] = 0
    ones, corner = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8), torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(conference, ones) + torch.kron(torch.eye(order // 2, dtype=torch.int8), corner)


def sylvester(order: int) -> Int8[Tensor, "order order"]:
    """The Hadamard matrix of ±1 of a power of two: [[1, 1], [1, -1]] multiplied with itself."""
    matrix = torch.ones(1, 1, dtype=torch.int8)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix


def span(width: int, block: int | None) -> int:
    """How many channels of ``width`` are turned together.

    Raises:
        ValueError: the block does not divide the width.
    """
    if block is not None and (block < 1 or width % block):
        raise ValueError(f"block={block} does not divide the {width} channels; a divisor with a Hadamard matrix would work")
    return block or width


def factors(size: int) -> tuple[int, int]:
    """The two orders, about equal, whose matrices multiply (Kronecker) to that of ``size``: m · 2^i and 2^(a - i)."""
    least, twos = core(size), size // core(size)
    right = min((2**i for i in range(twos.bit_length())), key=lambda right: (size // right + right, right))
    assert size % right == 0 and right <= twos and least <= size // right
    return size // right, right


@cache
def factor(order: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "order order"]:
    """The normalised matrix of a factor of :func:`factors`, kept."""
    with torch.inference_mode(False):
        return hadamard(order).to(device, dtype)


def _turn(x: Float[Tensor, "*batch size"], block: int | None) -> Float[Tensor, "*batch size"]:
    left, right = factors(span(x.shape[-1], block))
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    turned = x.to(dtype).reshape(-1, right) @ factor(right, dtype, x.device)
    if left > 1:
        turned = torch.matmul(factor(left, dtype, x.device), turned.view(-1, left, right))
    return turned.reshape(x.shape).to(x.dtype)


def _core(size: int) -> int | None:
    twos = size & -size
    odd = size // twos
    if odd == 1:
        return 1
    orders = (odd * 2**i for i in range(2, twos.bit_length()))
    return next((m for m in orders if _is_field(m - 1) or (m // 2 % 4 == 2 and _is_field(m // 2 - 1))), None)


@cache
def _is_field(q: int) -> bool:
    return _prime_power(q) is not None


def _prime_power(q: int) -> tuple[int, int] | None:
    """The prime and the exponent, for a power of an odd prime."""
    prime = next((p for p in range(3, isqrt(max(q, 0)) + 1, 2) if q % p == 0), q)
    power, left = 0, q
    while left > 1 and left % prime == 0:
        power, left = power + 1, left // prime
    return (prime, power) if q > 2 and q % 2 and left == 1 else None


def _field(q: int) -> tuple[Int8[Tensor, " q"], Shaped[Tensor, "q q"]]:
    """Of the field of ``q`` elements, q a power of an odd prime: the quadratic character of each (0, 1, -1), and the table of sums; element 0 is zero.

    Elements are polynomials over the prime field by their digits; the modulus is the first monic polynomial under which squares are half of all, which holds
    of irreducible ones alone.
    """
    found = _prime_power(q)
    assert found is not None
    prime, power = found
    digits = torch.tensor(list(product(range(prime), repeat=power)))  # highest power first: row n has the digits of n
    places = prime ** torch.arange(power - 1, -1, -1)
    sums = ((digits[:, None] + digits) % prime) @ places
    for modulus in digits:
        squares = _squares(digits, modulus, prime) @ places
        character = torch.full((q,), -1, dtype=torch.int8)
        character[squares] = 1
        character[0] = 0
        if int((character == 1).sum()) == (q - 1) // 2 and int((squares == 0).sum()) == 1:
            return character, sums
    raise AssertionError(f"no irreducible polynomial of degree {power} over {prime}; there always is one")


def _squares(digits: Shaped[Tensor, "q power"], modulus: Shaped[Tensor, " power"], prime: int) -> Shaped[Tensor, "q power"]:
    """Each polynomial squared, modulo x^power + ``modulus``."""
    power = digits.shape[1]
    total = torch.zeros_like(digits)
    for place in range(power):  # Horner: times x, plus the next digit times the whole
        carry = total[:, :1].clone()
        total = torch.cat((total[:, 1:], torch.zeros_like(carry)), dim=1) - carry * modulus
        total = (total + digits[:, place : place + 1] * digits) % prime
    return total
