"""A picture of what is found again in long texts, by length and depth. Not here: the numbers, or other pictures (``plots.py``)."""

from collections.abc import Mapping

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from assay.ops.evaluate.plots import _png


def needle_png(shares: Mapping[tuple[str, int, int], float], *, title: str = "") -> bytes:
    """One panel a kind, lengths across and depths down, the share found again in percent as colour and number; 0 at the top is the text's beginning.

    Args:
        shares: from 0 to 1, by kind, length in tokens, and depth in percent; a field that is missing is left white.
    Raises:
        ValueError: there is nothing to draw.
    """
    if not shares:
        raise ValueError("there is no share to draw; expected one for at least one kind, length and depth")
    kinds = list(dict.fromkeys(kind for kind, _, _ in shares))
    lengths, depths = sorted({length for _, length, _ in shares}), sorted({depth for *_, depth in shares})
    width = min(1.0 + len(kinds) * max(1.8, 0.55 * len(lengths)), 14.0)
    figure = Figure(figsize=(width + 0.8, min(1.5 + 0.38 * len(depths), 9.0)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    small = len(lengths) * len(kinds) <= 24 and len(depths) <= 24  # numbers are readable
    image = None
    for kind, axes in zip(kinds, panels, strict=True):
        values = [[100 * shares.get((kind, length, depth), float("nan")) for length in lengths] for depth in depths]
        image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=100, interpolation="nearest")
        axes.set_title(kind, fontsize=10)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                if small and value == value:
                    axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color="white" if value < 60 else "black")
    panels[0].set_ylabel("depth (% of the text)", fontsize=9)
    figure.supxlabel("length of the prompt (tokens)", fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=list(panels), pad=0.02).set_label("found again (%)", fontsize=9)
    return _png(figure)
