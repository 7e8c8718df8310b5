"""Whether a difference is real: tests of paired items, intervals, what a sample of this size can find. Values in, numbers out; scipy where it has them.

Not here: which items belong together (``warehouse/views/paired.sql``, whose SQL gives the same numbers), scores themselves (``ops/suites``).
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

RESAMPLES = 2000
CHUNK = 4_000_000  # numbers drawn at a time, so that a bootstrap of many items stays within some 100 MB


class Interval(NamedTuple):
    """An estimate and the bounds between which the true value lies at the level that was asked for."""

    value: float
    low: float
    high: float


class Mean(NamedTuple):
    """A mean over values; its standard error is over clusters, NaN of a single one. ``n`` counts values."""

    value: float
    standard_error: float
    n: int
    clusters: int


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p that two shares on the same items are equal: ``b`` items are right only in the one, ``c`` only in the other.

    Under the null each of the b + c is either with probability 1/2. Exact, hence conservative: it errs in at most the stated share of cases.

    Raises:
        ValueError: a count is negative or no whole number.
    Source:
        McNemar 1947, doi:10.1007/BF02295996, with the binomial distribution in place of its χ².
    """
    for name, count in (("b", b), ("c", c)):
        if count != int(count) or count < 0:
            raise ValueError(f"{name}={count} is no count of items; expected a whole number from 0, not a share")
    return float(stats.binomtest(int(b), int(b + c)).pvalue) if b + c else 1.0


def sign_flip_test(differences: ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p that paired ``differences`` are symmetric about 0: how often random signs make a mean as far from 0. Exact up to 13 of them.

    Raises:
        ValueError: there are fewer than 2 differences, or one is not finite.
    Source:
        Fisher 1935, The Design of Experiments, section 21; Phipson and Smyth 2010, doi:10.2202/1544-6115.1585, for what random signs miss.
    """
    values = _values(differences, at_least=2)
    found = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=resamples, vectorized=True, rng=seed)
    return float(found.pvalue)


def bootstrap_mean(
    values: ArrayLike,
    *,
    clusters: Sequence[Hashable] | None = None,
    method: Literal["percentile", "bca"] = "percentile",
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The mean of ``values`` with a bootstrap interval; of paired differences, the interval of a difference of means.

    Clusters are drawn whole, with all their values: n samples of a problem are no n independent answers.

    Args:
        values: [n], finite.
        clusters: [n], which values belong together; each is its own when left out.
        method: ``percentile`` takes quantiles of the resampled means; ``bca`` corrects them for bias and skewness. Both are widened as Student's t is
            wider than the normal distribution for so few clusters, without which they hold too little. Of 50 values ``bca`` still does: it errs in 6 %.
        level: the share of intervals that hold the true mean, within 0 and 1.
    Returns:
        The bounds equal the value where all clusters have the same mean.
    Raises:
        ValueError: fewer than 2 clusters, a value that is not finite, clusters of another length, a level outside (0, 1).
    Source:
        Efron 1987, doi:10.1080/01621459.1987.10478410; Davison and Hinkley 1997, section 3.8, for clusters; Hesterberg 2015, section 5.3,
        doi:10.1080/00031305.2015.1089789, for the width.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level}; expected a share between 0 and 1, such as 0.95")
    totals, sizes = _clustered(_values(values), clusters, at_least=2)
    mean = totals.sum() / sizes.sum()
    if np.ptp(totals / sizes) == 0:
        return Interval(float(mean), float(mean), float(mean))
    drawn = _resampled_means(totals, sizes, resamples, np.random.default_rng(seed))
    count = len(totals)
    far = stats.t.ppf((1 + level) / 2, count - 1) * (count / (count - 1)) ** 0.5
    tails = stats.norm.cdf([-far, far])
    if method == "bca":
        below = ((drawn < mean).sum() + (drawn == mean).sum() / 2) / resamples
        bias = stats.norm.ppf(np.clip(below, 0.5 / resamples, 1 - 0.5 / resamples))
        left_out = (totals.sum() - totals) / (sizes.sum() - sizes)  # the jackknife: each cluster in turn
        off = left_out.mean() - left_out
        off /= np.abs(off).max() or 1.0
        skew = (off**3).sum() / (6 * (off**2).sum() ** 1.5) if off.any() else 0.0
        z = bias + np.array([-far, far])
        room = 1 - skew * z  # none is left where the values are so skewed that the bound is the outermost
        tails = stats.norm.cdf(np.where(room > 0, bias + z / np.where(room > 0, room, 1), np.copysign(np.inf, z)))
    low, high = np.quantile(drawn, tails, method="weibull")  # of the tails beyond, the mean share is the one asked for
    return Interval(float(mean), float(low), float(high))


def clustered_mean(values: ArrayLike, clusters: Sequence[Hashable] | None = None) -> Mean:
    """The mean of ``values`` with the standard error over clusters; with one value a cluster, s / √n.

    The residuals of a cluster are added before they are squared, times k / (k − 1) for k clusters.

    Raises:
        ValueError: there is no value, one is not finite, or ``clusters`` has another length.
    Source:
        Liang and Zeger 1986, doi:10.1093/biomet/73.1.13, of an intercept alone; Miller 2024, arXiv:2411.00640, section 2.2.
    """
    array = _values(values)
    totals, sizes = _clustered(array, clusters)
    mean, count = totals.sum() / sizes.sum(), len(totals)
    if count < 2:
        return Mean(float(mean), math.nan, len(array), count)
    variance = ((totals - sizes * mean) ** 2).sum() / sizes.sum() ** 2 * count / (count - 1)
    return Mean(float(mean), float(variance**0.5), len(array), count)


def wilson(right: float, n: float, *, level: float = 0.95) -> Interval:
    """The share ``right`` / ``n`` with Wilson's interval, which has a width at 0 and at 1 too.

    Args:
        right, n: counts; or, where samples are clustered, the same share of an effective number of independent samples.
    Raises:
        ValueError: ``n`` is not above 0, or ``right`` not within it.
    Source:
        Wilson 1927, doi:10.1080/01621459.1927.10502953, without a continuity correction.
    """
    if not (n > 0 and 0 <= right <= n):
        raise ValueError(f"{right} of {n}; expected n above 0, and from 0 to n right ones")
    share, z = right / n, float(stats.norm.ppf((1 + level) / 2))
    middle, half = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = ((middle + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
    return Interval(share, 0.0 if right == 0 else max(0.0, low), 1.0 if right == n else min(1.0, high))


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p adjusted for all of them being asked: those at most α hold together, with an error of α for any of them.

    Raises:
        ValueError: a p is not within 0 and 1; a test that gave none is to be left out.
    Source:
        Holm 1979, https://www.jstor.org/stable/4615733.
    """
    p = np.asarray(p_values, dtype=float)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"got p-values {[each for each in p.tolist() if not 0 <= each <= 1]}; expected each from 0 to 1")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return adjusted.tolist()


def detectable_mean(spread: float, n: int, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest mean difference of ``n`` pairs that a two-sided paired t-test at ``alpha`` finds in the share ``power`` of samples.

    So "no difference was found" can say how large a one would have been.

    Args:
        spread: the standard deviation of the paired differences, as observed; of clusters, √n times the standard error, with ``n`` clusters.
    Raises:
        ValueError: ``spread`` is negative, fewer than 2 pairs, ``alpha`` or ``power`` outside (0, 1).
    Source:
        Bloom 1995, doi:10.1177/0193841X9501900504: (t₁₋α⸝₂ + t_power) standard errors; at n = 5 it is 3 % off the noncentral t.
    """
    _check_power(n, alpha, power)
    if not spread >= 0:
        raise ValueError(f"spread={spread}; expected a standard deviation of paired differences, from 0")
    return float(spread / math.sqrt(n) * (stats.t.ppf(1 - alpha / 2, n - 1) + stats.t.ppf(power, n - 1)))


def detectable_share(discordant: float, n: int, *, alpha: float = 0.05, power: float = 0.8) -> float | None:
    """The smallest difference of two shares on the same ``n`` items that McNemar's test finds, when they differ on the share ``discordant`` of items.

    A difference d needs discordance on d of the items at least; a lower rate is raised to that. None where even a difference of 1 would be missed.

    Raises:
        ValueError: ``discordant`` is not a share; otherwise as :func:`detectable_mean`.
    Source:
        Miettinen 1968, doi:10.2307/2528462: n = (z_α √ψ + z_β √(ψ − d²))² / d², solved for d.
    """
    _check_power(n, alpha, power)
    if not 0 <= discordant <= 1:
        raise ValueError(f"discordant={discordant}; expected the share of items on which the two differ, 0 to 1, not a count")
    z_alpha, z_beta = float(stats.norm.ppf(1 - alpha / 2)), float(stats.norm.ppf(power))
    least = (z_alpha + z_beta) ** 2 / n
    if least > 1:
        return None
    rate = max(discordant, least)
    root = math.sqrt(n * z_alpha**2 - (n + z_beta**2) * (z_alpha**2 - z_beta**2))
    return min(1.0, math.sqrt(rate) * (z_alpha * math.sqrt(n) + root) / (n + z_beta**2))


def _values(values: ArrayLike, at_least: int = 1) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < at_least:
        raise ValueError(f"got values of shape {array.shape}; expected one list of at least {at_least}")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{(~np.isfinite(array)).sum()} of {len(array)} values are not finite; leave out the items that have none, of both variants"
        )
    return array


def _clustered(
    values: NDArray[np.float64], clusters: Sequence[Hashable] | None, at_least: int = 1
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The sum of the values of each cluster, and how many they are."""
    if clusters is None:
        totals, sizes = values, np.ones(len(values))
    else:
        if len(clusters) != len(values):
            raise ValueError(f"{len(clusters)} clusters for {len(values)} values; expected one for each")
        number: dict[Hashable, int] = {}
        at = [number.setdefault(cluster, len(number)) for cluster in clusters]
        totals, sizes = np.bincount(at, weights=values).astype(np.float64), np.bincount(at).astype(np.float64)
    if len(totals) < at_least:
        raise ValueError(
            f"got {len(totals)} cluster of {len(values)} values; expected at least {at_least}: one says nothing of the spread between them"
        )
    return totals, sizes


def _resampled_means(
    totals: NDArray[np.float64], sizes: NDArray[np.float64], resamples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Means of so many draws of clusters with putting back."""
    count, parts = len(totals), []
    step = max(1, CHUNK // count)
    for start in range(0, resamples, step):
        drawn = generator.integers(0, count, (min(step, resamples - start), count))
        parts.append(totals[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(parts)


def _check_power(n: int, alpha: float, power: float) -> None:
    if n < 2 or not (0 < alpha < 1 and 0 < power < 1):
        raise ValueError(f"n={n}, alpha={alpha}, power={power}; expected at least 2 pairs, and alpha and power between 0 and 1")
