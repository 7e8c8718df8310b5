"""Averages of per-token divergences with their standard errors, by slice; per-window items; the histogram. Not here: the per-token values.

Tokens of one window are not independent, so windows are the clusters of every standard error. A mean m = Σx / n over windows w has

    se² = W / (W − 1) · Σ_w (x_w − m · n_w)² / n²,

which is sd(window means) / √W where all windows have equally many tokens. A quantile's (Woodruff 1952) is half the distance between the values whose
ranks lie one standard error of the cumulative share below and above. With one window, and for a maximum, there is none.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from assay.ops.evaluate.divergence import PerToken
from assay.ops.evaluate.token_classes import CLASSES


class Metric(NamedTuple):
    """A number with what is needed to trust it; ``value`` is None where it is not finite."""

    metric: str
    value: float | None
    unit: str
    n: int
    standard_error: float | None = None
    slice_kind: str = "all"
    slice: str = "all"
    status: str = "ok"


class Summary(NamedTuple):
    """``items``: one row a window and metric. ``histogram``: counts of tokens between consecutive edges (nats), see :func:`histogram`."""

    metrics: list[Metric]
    items: list[dict[str, Any]]
    histogram: tuple[list[float], list[int]]


def summarise(
    tokens: PerToken,
    window: Int64[Tensor, " tokens"],
    *,
    classes: Int64[Tensor, " tokens"] | None = None,
    language: Int64[Tensor, " tokens"] | None = None,
    languages: tuple[str, ...] = (),
    is_base: bool = False,
) -> Summary:
    """The metrics of ``tokens``, over all of them, by token class, and by language where the text has more than one.

    Args:
        window: which window scored each token.
        is_base: the variant is the base itself, run again in another batch size; its mean KL is the engine's own noise, ``self_kl_nats``.
    """
    everything = torch.ones(len(window), dtype=torch.bool)
    metrics = slice_metrics(tokens, window, everything, "all", "all")
    if classes is not None:
        for index, name in enumerate(CLASSES):
            metrics += slice_metrics(tokens, window, classes == index, "token_class", name)
    if language is not None and len(language.unique()) > 1:
        for index in language.unique().tolist():
            metrics += slice_metrics(tokens, window, language == index, "language", languages[index])
    if is_base:
        metrics.append(next(metric for metric in metrics if metric.metric == "kl_mean_nats")._replace(metric="self_kl_nats"))
    items = []
    for at in window.unique(sorted=True).tolist():
        inside = window == at
        for name, values in (("kl_mean_nats", tokens.kl), ("nll_mean_nats", tokens.nll)):
            mean = float(values[inside].double().mean())
            items.append({"item": int(at), "metric": name, "value": mean if math.isfinite(mean) else None})
    return Summary(metrics, items, histogram(tokens.kl))


def slice_metrics(
    tokens: PerToken, window: Int64[Tensor, " tokens"], where: Bool[Tensor, " tokens"], slice_kind: str, slice: str
) -> list[Metric]:
    """The metrics over the tokens ``where``; none if there are no such tokens."""
    if not bool(where.any()):
        return []
    kl, tv, agrees, nll, base_nll = (part[where].double() for part in (tokens.kl, tokens.tv, tokens.agrees, tokens.nll, tokens.base_nll))
    window, n = window[where], int(where.sum())
    rows: list[tuple[str, float, str, float | None]] = [("kl_mean_nats", *_mean(kl, window, "nats"))]
    order = kl.sort()
    for name, share in (("kl_p50_nats", 0.5), ("kl_p90_nats", 0.9), ("kl_p99_nats", 0.99)):
        rows.append((name, *_quantile(order.values, window[order.indices], share)))
    rows.append(("kl_max_nats", float(order.values[-1]), "nats", None))
    rows.append(("tv_mean", *_mean(tv, window, "1")))
    rows.append(("top1_agreement", *_mean(agrees, window, "1")))
    ppl, base_ppl = _exp(float(nll.mean())), _exp(float(base_nll.mean()))
    for name, value, slope in (
        ("perplexity", ppl, ppl * nll),
        ("base_perplexity", base_ppl, base_ppl * base_nll),
        ("perplexity_delta", ppl - base_ppl, ppl * nll - base_ppl * base_nll),  # to first order, and paired by token
    ):
        rows.append((name, value, "1", standard_error(slope, window)))
    return [_metric(name, value, unit, n, error, slice_kind, slice) for name, value, unit, error in rows]


def histogram(
    kl: Float[Tensor, " tokens"], *, low: float = 1e-9, high: float = 100.0, per_decade: int = 5
) -> tuple[list[float], list[int]]:
    """Counts of finite KLs in bins of equal width in log₁₀; what lies outside is counted in the first or last bin."""
    decades = round(math.log10(high / low))
    exponents = torch.arange(decades * per_decade + 1, dtype=torch.float64) / per_decade + math.log10(low)
    finite = kl[kl.isfinite()].double().clamp(min=low, max=high)
    index = ((finite.log10() - math.log10(low)) * per_decade).floor().long().clamp_(0, decades * per_decade - 1)
    return (10**exponents).tolist(), torch.bincount(index, minlength=decades * per_decade).tolist()


def _metric(name: str, value: float, unit: str, n: int, error: float | None, slice_kind: str, slice: str) -> Metric:
    if not math.isfinite(value):
        return Metric(name, None, unit, n, None, slice_kind, slice, "not_finite")
    return Metric(name, value, unit, n, error if error is not None and math.isfinite(error) else None, slice_kind, slice)


def _mean(values: Tensor, window: Tensor, unit: str) -> tuple[float, str, float | None]:
    return float(values.mean()), unit, standard_error(values, window)


def standard_error(values: Tensor, window: Tensor) -> float | None:
    """Of the mean of ``values``, clustered by window; None with fewer than two windows."""
    _, cluster = window.unique(return_inverse=True)
    clusters = int(cluster.max()) + 1
    if clusters < 2:
        return None
    residual = torch.zeros(clusters, dtype=torch.float64).index_add_(0, cluster, values.double() - values.double().mean())
    return math.sqrt(float(residual.square().sum()) * clusters / (clusters - 1)) / len(values)


def _quantile(ordered: Tensor, window: Tensor, share: float) -> tuple[float, str, float | None]:
    """The smallest value with at least ``share`` of the values at or below it."""
    last = len(ordered) - 1
    rank = min(max(math.ceil(share * len(ordered)) - 1, 0), last)
    value = float(ordered[rank]) if bool(ordered[-1].isfinite()) else float("nan")
    error = standard_error((ordered <= ordered[rank]).double(), window)
    if error is None:
        return value, "nats", None
    below, above = (min(max(math.ceil((share + sign * error) * len(ordered)) - 1, 0), last) for sign in (-1, 1))
    return value, "nats", float(ordered[above] - ordered[below]) / 2


def _exp(mean_nll: float) -> float:
    return math.exp(mean_nll) if mean_nll < 700 else float("inf")
