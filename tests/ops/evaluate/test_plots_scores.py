"""Pictures of task scores: they are PNGs under the limit, differ where the findings do, and refuse to be empty."""

import pytest

from assay.ops.evaluate.plots import LIMIT_BYTES
from assay.ops.evaluate.plots_scores import temperature_png, work_png

WORK = [
    {"variant": variant, "work": work, "base_value": 0.6, "difference": lost, "found": lost < -0.05}
    for variant, lost in (("int8", 0.01), ("int3", -0.2))
    for work in ("piqa", "graded_arithmetic", "needle")
]
PASS = [
    {"variant": variant, "k": k, "temperature": t, "value": 0.3 * k**0.3 / (1 + t)}
    for variant in ("none", "int4")
    for k in (1, 8)
    for t in (0.3, 1.0)
]


@pytest.mark.parametrize(("draw", "rows"), [(work_png, WORK), (temperature_png, PASS)])
def test_a_picture_is_a_png_that_fits_into_a_page(draw, rows):
    picture = draw(rows, title="what falls")
    assert picture.startswith(b"\x89PNG") and len(picture) < LIMIT_BYTES
    assert draw(rows[:-1]) != draw(rows)


def test_a_difference_that_no_test_found_looks_different():
    assert work_png([{**row, "found": True} for row in WORK]) != work_png(WORK)


def test_a_variant_without_one_kind_of_work_has_a_hole_there():
    assert work_png([row for row in WORK if (row["variant"], row["work"]) != ("int8", "needle")]) != work_png(WORK)


@pytest.mark.parametrize("draw", [work_png, temperature_png])
def test_nothing_to_draw_is_refused(draw):
    with pytest.raises(ValueError, match="there is no"):
        draw([])
