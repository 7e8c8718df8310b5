"""Pictures: PNG, small, drawn from what they are given, and nothing shared."""

import sys
import threading

import pytest
import torch

from assay.ops.evaluate.plots import LIMIT_BYTES, frontier_png, heat_map_png, kl_histogram_png, layer_curve_png
from assay.ops.evaluate.summarise import histogram

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
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
        lambda: layer_curve_png([3.0, 5.0, 4.0], logarithmic=True),
        lambda: layer_curve_png([0.0, 5.0], logarithmic=True),
        lambda: heat_map_png(
            {f"{name}_proj": [20 + layer % 7 for layer in range(80)] for name in PROJECTIONS}, label="signal over noise (dB)"
        ),
        lambda: heat_map_png({"one": [1.0]}),
    ],
)
def test_a_picture_is_a_small_png_and_always_the_same(draw):
    picture = draw()
    assert picture.startswith(PNG) and 2_000 < len(picture) < LIMIT_BYTES
    assert draw() == picture


def test_different_data_make_different_pictures():
    assert layer_curve_png([0.1, 0.2], [1]) != layer_curve_png([0.1, 0.2], [0]) != layer_curve_png([0.1, 0.2])
    assert frontier_png(rows(3)) != frontier_png(rows(4))


def test_a_curve_is_logarithmic_where_that_is_asked_or_its_scores_are_far_apart():
    assert layer_curve_png([3.0, 5.0], logarithmic=True) != layer_curve_png([3.0, 5.0])
    assert layer_curve_png([3.0, 500.0], logarithmic=True) == layer_curve_png([3.0, 500.0])
    assert layer_curve_png([0.0, 5.0], logarithmic=True) == layer_curve_png([0.0, 5.0])  # 0 has no place on it


def test_what_has_no_number_is_white_in_a_heat_map():
    full = {"q_proj": [1.0, 2.0], "o_proj": [3.0, 4.0]}
    missing, broken = ({**full, "o_proj": [gone, 4.0]} for gone in (None, float("inf")))
    assert heat_map_png(missing) == heat_map_png(broken) != heat_map_png(full)
    with pytest.raises(ValueError, match="no layer"):
        heat_map_png({"q_proj": [None, float("nan")]})


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


def test_pictures_are_drawn_from_several_threads_without_pyplot(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another test may have needed it
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(frontier_png(rows(5)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3
    assert "matplotlib.pyplot" not in sys.modules
