"""Pictures of results as PNG bytes, small enough to be shown inside a page. Not here: what the numbers are.

Figures are made without pyplot, so that nothing is shared between threads and nothing leaks.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2f6db3", "#d9682b", "#8a8a8a"
LIMIT_BYTES = 50_000
ZERO_NATS = 1e-8  # below it a mean KL is rounding, and a logarithmic axis has no place for it


def kl_histogram_png(edges: Sequence[float], counts: Sequence[int], *, marks: Mapping[str, float] | None = None, title: str = "") -> bytes:
    """Share of tokens by KL(base‖variant).

    Args:
        edges: of the bins, nats, rising and positive; one more than ``counts``.
        marks: named values (nats) drawn as lines, for example the mean and the 99th percentile.
    """
    total = sum(counts)
    if not total:
        raise ValueError("there is no token with a finite KL to draw")
    used = [index for index, count in enumerate(counts) if count]
    first, last = used[0], used[-1]
    figure, axes = _figure(title)
    axes.stairs([100 * count / total for count in counts[first : last + 1]], edges[first : last + 2], fill=True, color=BLUE, alpha=0.8)
    axes.set_xscale("log")
    for (name, value), style in zip((marks or {}).items(), ("-", "--", ":", "-."), strict=False):
        if value > 0 and math.isfinite(value):
            axes.axvline(value, color=ORANGE, linestyle=style, linewidth=1.5, label=f"{name} {value:.3g}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    axes.set_xlabel("KL(base‖variant) per token (nats)")
    axes.set_ylabel("tokens (%)")
    return _png(figure)


def recovery_curve_png(curve: Sequence[Mapping[str, Any]], *, title: str = "") -> bytes:
    """What a student regains: its KL to the base and how often both have the same first choice, against the tokens trained on; else its log perplexity.

    Args:
        curve: points with ``tokens`` and, where the student was evaluated, ``metrics`` with ``kl_nats`` and ``top1_agreement``, or ``log_perplexity``.
    """
    points = [(each["tokens"], each["metrics"]) for each in curve if each["metrics"]]
    if not points:
        raise ValueError("no point of the curve has an evaluation to draw")
    figure, axes = _figure(title)
    tokens = [at for at, _ in points]
    axes.set_xlabel("tokens trained on")
    if "kl_nats" not in points[0][1]:
        axes.plot(tokens, [metrics["log_perplexity"] for _, metrics in points], color=BLUE, marker="o", markersize=3)
        axes.set_ylabel("log perplexity (nats a token)")
        return _png(figure)
    axes.plot(tokens, [metrics["kl_nats"] for _, metrics in points], color=BLUE, marker="o", markersize=3)
    axes.set_ylabel("mean KL(base‖student) (nats)", color=BLUE)
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.plot(tokens, [100 * metrics["top1_agreement"] for _, metrics in points], color=ORANGE, marker="s", markersize=3)
    other.set_ylabel("same first choice (%)", color=ORANGE)
    other.set_ylim(0, 100)
    return _png(figure)


def frontier_png(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> bytes:
    """Size against mean KL of the variants of an experiment; those that no other beats on both are joined.

    Args:
        rows: mappings with ``label``, ``size_bytes`` and ``kl_mean_nats``; rows where one of the numbers is None are left out.
    """
    points = [(str(row["label"]), row["size_bytes"] / 2**20, float(row["kl_mean_nats"])) for row in rows if _drawable(row)]
    if not points:
        raise ValueError("there is no variant with both a size and a finite KL to draw")
    floor = min((kl for *_, kl in points if kl > ZERO_NATS), default=1e-3) / 10  # where a KL of zero is drawn
    placed = sorted((size, kl, label) if kl > ZERO_NATS else (size, floor, f"{label} (KL 0)") for label, size, kl in points)
    front, best = [], math.inf
    for size, kl, _ in placed:
        if kl < best:
            front.append((size, kl))
            best = kl
    figure, axes = _figure(title, width=7.2, height=4.6)
    axes.plot(*zip(*front, strict=True), color=ORANGE, linewidth=1.2, zorder=1, label="none smaller has a smaller KL")
    axes.scatter([size for size, *_ in placed], [kl for _, kl, _ in placed], color=BLUE, s=26, zorder=2)
    axes.set_yscale("log")
    axes.margins(x=0.16, y=0.12)
    axes.set_xlabel("size of the tensors as stored (MiB)")
    axes.set_ylabel("mean KL(base‖variant) (nats)")
    axes.legend(frameon=False, fontsize=9)
    _label(figure, axes, [(size, kl, label) for size, kl, label in placed])
    return _png(figure)


def layer_curve_png(
    scores: Sequence[float],
    removed: Sequence[int] = (),
    *,
    title: str = "",
    label: str = "Block Influence (1 − cos)",
    logarithmic: bool = False,
) -> bytes:
    """A score for each layer, with the removed ones marked; of a run that is scored by its first layer, later layers may have no score.

    Args:
        logarithmic: where all scores are above 0; scores that differ by more than 20 times always are.
    """
    if not scores:
        raise ValueError("there is no layer to draw")
    figure, axes = _figure(title)
    gone = sorted(set(removed))
    axes.plot(range(len(scores)), scores, color=BLUE, linewidth=1.2, marker="o", markersize=4)
    if gone:
        marked = [layer for layer in gone if layer < len(scores)]
        name = f"removed: {', '.join(map(str, gone))}"
        axes.scatter(marked, [scores[layer] for layer in marked], color=ORANGE, s=48, zorder=3, marker="X", label=name)
        axes.legend(frameon=False, fontsize=9)
    if min(scores) > 0 and (logarithmic or max(scores) > 20 * min(scores)):
        axes.set_yscale("log")
    axes.set_xlabel("layer (0 is the first)")
    axes.set_ylabel(label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _png(figure)


def heat_map_png(rows: Mapping[str, Sequence[float | None]], *, title: str = "", label: str = "") -> bytes:
    """A colour for each layer (across) and kind of layer (down); what is None or not finite is left white.

    Args:
        rows: by name, one value a layer; all of one length.
    """
    values = [[math.nan if value is None or not math.isfinite(value) else value for value in row] for row in rows.values()]
    if not any(math.isfinite(value) for row in values for value in row):
        raise ValueError("there is no layer with a number to draw")
    figure, axes = _figure(title, width=7.2, height=1.3 + 0.3 * len(values))
    axes.grid(False)
    image = axes.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.set_xlabel("layer (0 is the first)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, pad=0.02).set_label(label, fontsize=9)
    return _png(figure)


def _drawable(row: Mapping[str, Any]) -> bool:
    return all(row[name] is not None and math.isfinite(row[name]) for name in ("size_bytes", "kl_mean_nats"))


def _figure(title: str, *, width: float = 6.4, height: float = 3.6) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=11, loc="left")
    return figure, axes


def _label(figure: Figure, axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Name the points where a name covers no point and no other name; a name that fits nowhere is left out."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in (axes.transData.transform((size, kl)) for size, kl, _ in points)]
    left, bottom, right, top = axes.get_window_extent(renderer).extents
    for size, kl, name in points:
        for dx, dy, side, height in ((7, 4, "left", "bottom"), (7, -4, "left", "top"), (-7, 4, "right", "bottom"), (-7, -4, "right", "top"),
                                     (0, 9, "center", "bottom"), (0, -9, "center", "top"), (12, 16, "left", "bottom"), (-12, 16, "right", "bottom"),
                                     (12, -16, "left", "top"), (-12, -16, "right", "top")):  # fmt: skip
            text = axes.annotate(name, (size, kl), (dx, dy), textcoords="offset points", ha=side, va=height, fontsize=7.5, color="#333333")
            box = text.get_window_extent(renderer).extents
            inside = box[0] >= left and box[2] <= right and box[1] >= bottom and box[3] <= top
            if inside and not any(box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken):
                taken.append(tuple(box))
                break
            text.remove()


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    data = stream.getvalue()
    if len(data) >= LIMIT_BYTES:
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=70, metadata={"Software": None})
        data = stream.getvalue()
    return data
