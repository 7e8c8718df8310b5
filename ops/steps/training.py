"""What every run of training is, from its spec: how many steps, on which windows, with which settings. Not here: any training."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from assay.schemas.texts import Text
from assay.schemas.training import Training

if TYPE_CHECKING:
    from torch import Tensor

    from assay.ops.train.loop import Settings

    Windows = Callable[[Text, int, int], Tensor]

HELD_OUT_TOKENS = 4096  # that a student is evaluated on while it is trained
STOP_ABOVE = 3.0  # times the lowest loss so far: a run that rises so far has diverged
CURVE = "curve.json"  # beside the weights that a run made: what it was on the way
CURVE_POINTS, EVALUATED_EACH = 60, 5  # about so many points has a curve, and each so many of them an evaluation


def steps_of(asked: Training) -> int:
    """Updates of the weights: whole ones, so rounded up."""
    return -(-asked.tokens // (asked.batch * asked.length))


def texts_of(asked: Training, windows: "Windows") -> "tuple[Tensor, Tensor]":
    """The windows to read, and those behind them in the text, which are held out."""
    count = steps_of(asked) * asked.batch
    ids = windows(asked.text, count + HELD_OUT_TOKENS // asked.length + 1, asked.length)
    return ids[:count], ids[count:]


def settings_of(asked: Training, seed: int) -> "Settings":
    """How the run is optimized and how often it is looked at."""
    from assay.ops.train.loop import Settings

    steps = steps_of(asked)
    record = max(1, steps // CURVE_POINTS)
    return Settings(
        steps=steps, learning_rate=asked.learning_rate, warmup_steps=steps * asked.warmup_pct // 100, record_every=record,
        evaluate_every=EVALUATED_EACH * record, stop_above=STOP_ABOVE, seed=seed,
    )  # fmt: skip
