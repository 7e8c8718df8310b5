"""Pictures of task scores: what each variant lost on each kind of work, and what a temperature does. Not here: the numbers, other pictures (``plots.py``)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from assay.ops.evaluate.plots import BLUE, GREY, ORANGE, _figure, _png

MARKERS = "osD^vPX*"


def work_png(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> bytes:
    """Variants down, kinds of work across: by how many points of a hundred the score differs from the base's, as colour and number.

    A number in brackets is a difference that no test found; only the others are coloured. The first line has the base's own scores.

    Args:
        rows: mappings with ``variant``, ``work``, ``difference`` and ``base_value`` (shares), and ``found`` (whether a test found the difference), in the
            order of the lines and columns.
    Raises:
        ValueError: there is nothing to draw.
    """
    if not rows:
        raise ValueError("there is no score to draw; expected at least one variant with a kind of work that the base has too")
    variants, works = (list(dict.fromkeys(row[name] for row in rows)) for name in ("variant", "work"))
    by_place = {(row["variant"], row["work"]): row for row in rows}
    base = {row["work"]: row["base_value"] for row in rows}
    most = max(5.0, *(100 * abs(row["difference"]) for row in rows))
    figure, axes = _figure(title, width=max(6.4, 2.2 + 0.95 * len(works)), height=1.9 + 0.34 * len(variants))
    axes.grid(False)
    shown = [
        [100 * row["difference"] if (row := by_place.get((variant, work))) and row["found"] else 0.0 for work in works]
        for variant in variants
    ]
    image = axes.imshow([[math.nan] * len(works), *shown], aspect="auto", cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest")
    for column, work in enumerate(works):
        axes.text(column, 0, f"{100 * base[work]:.0f} %", ha="center", va="center", fontsize=8.5, color="#333333")
        for line, variant in enumerate(variants, start=1):
            row = by_place.get((variant, work))
            if row is None:
                continue
            points = 100 * row["difference"]
            dark = row["found"] and abs(points) > 0.6 * most
            text = f"{points:+.0f}" if row["found"] else f"({points:+.0f})"
            axes.text(
                column, line, text, ha="center", va="center", fontsize=8.5, color="white" if dark else "black" if row["found"] else GREY
            )
    axes.set_yticks(range(len(variants) + 1), ["score of the base", *variants], fontsize=9)
    axes.set_xticks(range(len(works)), [work.replace(" ", "\n").replace("_", "\n") for work in works], fontsize=8.5)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, pad=0.02).set_label("points from the base\n( ): none found", fontsize=9)
    return _png(figure)


def temperature_png(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> bytes:
    """What is right at each temperature: one sample (full lines) and the best of k (dashed), a marker a variant.

    Args:
        rows: mappings with ``variant``, ``k`` (samples), ``temperature`` and ``value`` (a share).
    Raises:
        ValueError: there is nothing to draw.
    """
    if not rows:
        raise ValueError("there is no share to draw; expected pass@k of at least one variant and temperature")
    figure, axes = _figure(title, width=7.2, height=4.2)
    variants, ks = list(dict.fromkeys(row["variant"] for row in rows)), sorted({row["k"] for row in rows})
    ks = [ks[0], ks[-1]] if len(ks) > 1 else ks
    for number, variant in enumerate(variants):
        for k in ks:
            line = sorted((row["temperature"], row["value"]) for row in rows if row["variant"] == variant and row["k"] == k)
            one = k == ks[0]
            axes.plot(
                [at for at, _ in line], [100 * value for _, value in line], color=BLUE if one else ORANGE, linestyle="-" if one else "--",
                marker=MARKERS[number % len(MARKERS)], markersize=4.5, label=f"{variant}, {'one sample' if k == 1 else f'any of {k}'}",
            )  # fmt: skip
    axes.set_xlabel("temperature")
    axes.set_ylabel("problems solved (%)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5)
    return _png(figure)
