"""Pictures: PNG, small, drawn from what they are given, and nothing shared."""

import sys
import threading

import pytest
import torch

from assay.ops.evaluate.plots import LIMIT_BYTES, frontier_png, kl_histogram_png, layer_curve_png
from assay.ops.evaluate.summarise import histogram

PNG = b"\x89PNG\r\n\x1a\n"


def rows(count: int) -> list[dict]:
    return [
        {"label": f"depth4 / int{index}", "size_bytes": 2**20 * (40 + 7 * index), "kl_mean_nats": 2.0 / (index + 1)}
        for index in range(count)
    ]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: kl_histogram_png(*histogram(torch.linspace(0, 1, 5000) ** 8), marks={"mean": 0.1, "99 %": 0.9, "none": 0.0}),
        lambda: frontier_png(rows(12), title="size against KL"),
        lambda: frontier_png(rows(70)),
        lambda: frontier_png(rows(1)),
        lambda: layer_curve_png([0.1 + 0.01 * layer for layer in range(30)], [20, 21, 22, 23]),
        lambda: layer_curve_png([0.5]),
        lambda: layer_curve_png([0.3, 0.1, 0.2], [1, 2, 3, 4]),  # runs of four of seven layers, scored by their first
    ],
)
def test_a_picture_is_a_small_png_and_always_the_same(draw):
    picture = draw()
    assert picture.startswith(PNG) and 2_000 < len(picture) < LIMIT_BYTES
    assert draw() == picture


def test_different_data_make_different_pictures():
    assert layer_curve_png([0.1, 0.2], [1]) != layer_curve_png([0.1, 0.2], [0]) != layer_curve_png([0.1, 0.2])
    assert frontier_png(rows(3)) != frontier_png(rows(4))


def test_variants_without_a_number_are_left_out_and_a_kl_of_zero_is_drawn():
    some = [*rows(2), {"label": "base", "size_bytes": 10**8, "kl_mean_nats": 0.0}]
    broken = {"label": "broken", "size_bytes": 10**8, "kl_mean_nats": None}
    assert frontier_png([*some, broken]) == frontier_png(some)
    with pytest.raises(ValueError, match="no variant"):
        frontier_png([broken])
    with pytest.raises(ValueError, match="no token"):
        kl_histogram_png([1e-3, 1e-2], [0])
    with pytest.raises(ValueError, match="no layer"):
        layer_curve_png([])


def test_pictures_are_drawn_from_several_threads_without_pyplot():
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(frontier_png(rows(5)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3
    assert "matplotlib.pyplot" not in sys.modules
