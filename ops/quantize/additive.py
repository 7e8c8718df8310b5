"""Eight weights as a sum of learned vectors, one from each of a few codebooks: AQLM. Not here: fixed codebooks (``lattice.py``), or scalar formats (``grid.py``)."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

SIZE = 8  # weights a group
CHUNK = 2**12  # groups searched at a time
TINY = 1e-30


class Additive(NamedTuple):
    """A weight [rows, 8 groups]: each eight are their row's scale times the sum of the named vectors of all codebooks."""

    codes: UInt8[Tensor, "rows groups books"]
    codebooks: Float[Tensor, "books entries 8"]
    scales: Float[Tensor, " rows"]

    @property
    def shape(self) -> tuple[int, int]:
        rows, groups, _ = self.codes.shape
        return rows, groups * SIZE

    @property
    def form(self) -> str:
        """How it is stored, in a word, with the number of codebooks and the bits of their codes."""
        books, entries, _ = self.codebooks.shape
        return f"additive{books}x{(entries - 1).bit_length()}"

    def dense(self) -> Float[Tensor, "rows cols"]:
        """The whole weight in float32."""
        return _sums(self.codes, self.codebooks.float()) * self.scales.float()[:, None]

    @property
    def bits(self) -> float:
        """Stored bits a weight: codes (a byte each), codebooks and scales."""
        return 8 * sum(part.nbytes for part in self) / (self.codes.shape[0] * self.codes.shape[1] * SIZE)


def quantize(
    weight: Float[Tensor, "rows cols"],
    *,
    books: int = 2,
    code_bits: int = 8,
    rounds: int = 4,
    beam: int = 4,
    hessian: Float[Tensor, "cols cols"] | None = None,
    seed: int = 0,
) -> Additive:
    """Learn codebooks, codes and scales so that the error E = W - Ŵ has a small tr(E H Eᵀ); H is the identity without a Hessian.

    They begin as k-means of the rows at unit mean square, then of what is left for each further codebook, and are improved in ``rounds`` (:func:`improve`).

    Args:
        books: codebooks; each adds ``code_bits`` / 8 bits a weight.
        code_bits: 1 to 8; a codebook has 2^code_bits vectors. Codes are stored in bytes, whatever they need.
        beam: codes of a group that are kept while its codebooks are gone through.
        hessian: Xᵀ X of the inputs, up to a factor; positive semidefinite.
    Returns:
        Codebooks in float16 and scales in bfloat16, rounded once at the end.
    Raises:
        ValueError: columns that eight does not divide, fewer groups than vectors in a codebook, weights that are not finite, or a Hessian of zeros.
    Source:
        Egiazarian et al. 2024 (AQLM), §3, arXiv:2401.06118. Unlike it, codebooks are the (nearly) least-squares solution by conjugate gradients rather than
        by Adam, scales are solved for too, and whole blocks are not fine-tuned.
    """
    if not 1 <= code_bits <= 8 or books < 1 or beam < 1:
        raise ValueError(
            f"{books} codebooks of {code_bits} bits with a beam of {beam}; at least one, of 1 to 8 bits, with a beam of at least 1, work"
        )
    require_fit(*weight.shape, code_bits=code_bits)
    if not weight.isfinite().all():
        raise ValueError(
            f"{int((~weight.isfinite()).sum()):,} of {weight.numel():,} weights are NaN or infinite; finite ones can be rounded"
        )
    if hessian is not None and not (hessian.isfinite().all() and hessian.diagonal().mean() > 0):
        raise ValueError("the Hessian is zero or not finite: no input was seen; gather it over at least one token")
    weight, metric = weight.float(), None if hessian is None else hessian.float() / hessian.diagonal().mean()
    found = begin(weight, books=books, code_bits=code_bits, seed=seed)
    for _ in range(rounds):
        found = improve(weight, found, hessian=metric, beam=beam)
    return Additive(found.codes, found.codebooks.half(), found.scales.bfloat16())


def require_fit(rows: int, cols: int, *, code_bits: int = 8) -> None:
    """Refuse the shape of a weight.

    Raises:
        ValueError: columns that eight does not divide, or fewer groups than vectors in a codebook.
    """
    if cols % SIZE:
        raise ValueError(
            f"a group is of {SIZE} weights, which does not divide the {cols} columns of the weight; a multiple of {SIZE} columns works"
        )
    groups = rows * cols // SIZE
    if groups < 2**code_bits:
        raise ValueError(
            f"the {groups} groups of the weight are fewer than the {2**code_bits} vectors of a codebook; "
            f"code_bits={groups.bit_length() - 1} would work"
            if groups > 1
            else "a weight of one group has no codebook; two groups or more work"
        )


def begin(weight: Float[Tensor, "rows cols"], *, books: int, code_bits: int, seed: int) -> Additive:
    """Codebooks by k-means, each of what the ones before left over; all float32."""
    scales = weight.square().mean(dim=1).sqrt()
    left = (weight / scales.clamp(min=TINY)[:, None]).reshape(-1, SIZE)
    generator, codes, codebooks = torch.Generator().manual_seed(seed), [], []
    for _ in range(books):
        centres, nearest = k_means(left, 2**code_bits, generator)
        left = left - centres[nearest]
        codes.append(nearest.to(torch.uint8).view(len(weight), -1))
        codebooks.append(centres)
    return Additive(torch.stack(codes, dim=-1), torch.stack(codebooks), scales)


def k_means(
    vectors: Float[Tensor, "n size"], count: int, generator: torch.Generator, *, rounds: int = 10
) -> tuple[Float[Tensor, "count size"], Int[Tensor, " n"]]:
    """Lloyd's algorithm from ``count`` of the vectors drawn without replacement; each vector's centre is the nearest. A centre of nothing stays."""
    centres = vectors[torch.randperm(len(vectors), generator=generator)[:count].to(vectors.device)].clone()
    for _ in range(rounds):
        nearest = _nearest(vectors, centres)
        number = torch.bincount(nearest, minlength=count)
        means = torch.zeros_like(centres).index_add_(0, nearest, vectors) / number.clamp(min=1)[:, None]
        centres = torch.where(number[:, None] > 0, means, centres)
    return centres, _nearest(vectors, centres)


def improve(
    weight: Float[Tensor, "rows cols"], found: Additive, *, hessian: Float[Tensor, "cols cols"] | None = None, beam: int = 4
) -> Additive:
    """One round: codebooks, scales, codes, each the better for the others as they are. :func:`loss` never rises, but for rounding."""
    for step in (update_codebooks, update_scales):
        better = step(weight, found, hessian)
        if loss(weight, better, hessian) <= loss(weight, found, hessian):
            found = better
    return update_codes(weight, found, hessian, beam=beam)


def loss(weight: Float[Tensor, "rows cols"], found: Additive, hessian: Float[Tensor, "cols cols"] | None = None) -> float:
    """tr(E H Eᵀ) of E = W - Ŵ: of the identity, the sum of squares."""
    error = weight - found.dense()
    return float((_under(error, hessian) * error).sum(dtype=torch.float64))


def update_codebooks(
    weight: Float[Tensor, "rows cols"], found: Additive, hessian: Float[Tensor, "cols cols"] | None, *, steps: int = 12
) -> Additive:
    """The vectors, given codes and scales: a quadratic, lowered by conjugate gradients with each vector's weight as preconditioner."""
    codes, scales = found.codes.long(), found.scales[:, None]
    shape = found.codebooks.shape
    flat = (codes + shape[1] * torch.arange(shape[0], device=codes.device)).flatten()

    def down(values: Tensor) -> Tensor:
        groups = (_under(values, hessian) * scales).reshape(*codes.shape[:2], 1, SIZE).expand(-1, -1, shape[0], -1)
        return torch.zeros_like(found.codebooks).view(-1, SIZE).index_add_(0, flat, groups.reshape(-1, SIZE)).view(shape)

    weights = scales.square()[:, :, None].expand(codes.shape).flatten()
    mass = torch.zeros(shape[0] * shape[1], device=codes.device).index_add_(0, flat, weights).view(*shape[:2], 1)
    mass = torch.where(mass > 0, mass, 1.0)
    solution = found.codebooks.clone()
    residual = down(weight - found.dense())
    turned = residual / mass
    direction, size = turned, (residual * turned).sum()
    least = 1e-10 * size  # what float32 resolves: beyond, steps go astray
    for _ in range(steps):
        image = down(_sums(found.codes, direction) * scales)
        curvature = (direction * image).sum()
        if not (size > least and curvature > 0):
            break
        solution = solution + size / curvature * direction
        residual = residual - size / curvature * image
        turned = residual / mass
        before, size = size, (residual * turned).sum()
        direction = turned + size / before * direction
    return found._replace(codebooks=solution)


def update_scales(weight: Float[Tensor, "rows cols"], found: Additive, hessian: Float[Tensor, "cols cols"] | None) -> Additive:
    """The least-squares scale of each row."""
    sums = _sums(found.codes, found.codebooks)
    under = _under(sums, hessian)
    size = (sums * under).sum(dim=1)
    return found._replace(scales=torch.where(size > 0, (weight * under).sum(dim=1) / size.clamp(min=TINY), found.scales))


def update_codes(weight: Float[Tensor, "rows cols"], found: Additive, hessian: Float[Tensor, "cols cols"] | None, *, beam: int) -> Additive:
    """The codes of each group by beam search, given the others: with a Hessian one group of columns after the other, as each changes what is best next."""
    codes, books, scales = found.codes.long(), found.codebooks, found.scales[:, None]
    safe = torch.where(scales.abs() < TINY, TINY, scales)
    if hessian is None:
        targets, one = (weight / safe).reshape(-1, SIZE), torch.eye(SIZE, device=weight.device)
        chosen = search(targets, one, codes.flatten(0, 1), books, beam=beam)
        return found._replace(codes=chosen.view(codes.shape).to(torch.uint8))
    error = weight - found.dense()
    for group in range(codes.shape[1]):
        at = slice(group * SIZE, (group + 1) * SIZE)
        metric = hessian[at, at]
        # In x, the group's sum of vectors, the loss is s² x H x - 2 s x (H w + what the errors of other groups pull).
        pull = error @ hessian[:, at] + (weight[:, at] - error[:, at]) @ metric
        codes[:, group] = search(pull / safe, metric, codes[:, group], books, beam=beam)
        error[:, at] = weight[:, at] - scales * _sums(codes[:, group : group + 1], books)
    return found._replace(codes=codes.to(torch.uint8))


def search(
    targets: Float[Tensor, "n 8"],
    metric: Float[Tensor, "8 8"],
    codes: Int[Tensor, "n books"],
    codebooks: Float[Tensor, "books entries 8"],
    *,
    beam: int,
) -> Int[Tensor, "n books"]:
    """Codes that lower x A x - 2 x·t, x the sum of their vectors: from those given, each codebook's code is tried anew, the best ``beam`` being kept.

    What is given stays a candidate throughout, so that what is found is no worse.
    """
    parts = zip(targets.split(CHUNK), codes.split(CHUNK), strict=True)
    return torch.cat([_search(target, metric, code, codebooks, beam) for target, code in parts])


def _search(targets: Tensor, metric: Tensor, codes: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    kept = codes[:, None]  # [n, beams, books]
    sums = _sums(kept, codebooks).view(len(codes), 1, SIZE)
    entries = codebooks.shape[1]
    for book, vectors in enumerate(codebooks):
        rest = sums - vectors[kept[..., book]]
        under = rest @ metric
        scores = (rest * (under - 2 * targets[:, None])).sum(dim=-1)[..., None] - 2 * (targets[:, None] - under) @ vectors.T
        scores += ((vectors @ metric) * vectors).sum(dim=-1)
        others = torch.cat((kept[..., :book], kept[..., book + 1 :]), dim=-1)
        same = (others[:, :, None] == others[:, None]).all(dim=-1).tril(-1).any(dim=-1)
        scores.masked_fill_(same[..., None], torch.inf)  # they would give the same candidates again
        best = scores.flatten(1).topk(min(beam, entries), dim=1, largest=False).indices
        parent, code = best // entries, best % entries
        kept = kept.gather(1, parent[..., None].expand(-1, -1, kept.shape[-1])).clone()
        kept[..., book] = code
        sums = rest.gather(1, parent[..., None].expand(-1, -1, SIZE)) + vectors[code]
    return kept[:, 0]


def _sums(codes: Tensor, codebooks: Float[Tensor, "books entries 8"]) -> Float[Tensor, "rows cols"]:
    """The sums of vectors, groups side by side."""
    return sum((vectors[codes[..., book].long()] for book, vectors in enumerate(codebooks)), torch.zeros(())).flatten(1)


def _under(values: Float[Tensor, "rows cols"], hessian: Float[Tensor, "cols cols"] | None) -> Float[Tensor, "rows cols"]:
    return values if hessian is None else values @ hessian


def _nearest(vectors: Tensor, centres: Tensor) -> Tensor:
    norms = centres.square().sum(dim=1)
    return torch.cat([(norms - 2 * part @ centres.T).argmin(dim=1) for part in vectors.split(CHUNK)])
