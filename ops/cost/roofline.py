"""The time of a forward that cannot be beaten: bytes over bandwidth, or FLOPs over rate, whichever is longer. Not here: counting either, or measuring a device."""

import math
from typing import Literal, NamedTuple

Limit = Literal["weights", "kv", "compute", "launch"]


class StepTime(NamedTuple):
    """Seconds of one forward, of its parts, and the part that sets it: the larger of the two readings where memory does."""

    seconds: float
    weight_seconds: float
    kv_seconds: float
    compute_seconds: float
    limit: Limit


def step_time(*, weight_bytes: float, kv_bytes: float, flops: float, bandwidth: float, rate: float, launch: float = 0.0) -> StepTime:
    """max((weights + KV) / bandwidth, FLOPs / rate, launch): reading and arithmetic overlap, so the slower of them is the time.

    Args:
        weight_bytes: read once a forward, whatever the batch.
        kv_bytes: keys and values that all texts of the batch read together.
        flops: of the whole batch; 2 for a multiplication and an addition.
        bandwidth: bytes a second.
        rate: FLOPs a second in the dtype of the arithmetic.
        launch: seconds below which no forward can be, of starting work on the device once.
    Raises:
        ValueError: a negative amount, or a device that does nothing.
    Source:
        Williams et al. 2009, "Roofline", doi:10.1145/1498765.1498785.
    """
    if min(weight_bytes, kv_bytes, flops, launch) < 0:
        raise ValueError(f"weight_bytes={weight_bytes}, kv_bytes={kv_bytes}, flops={flops}, launch={launch}; none of them can be below 0")
    _positive(bandwidth=bandwidth, rate=rate)
    weights, kv, compute = weight_bytes / bandwidth, kv_bytes / bandwidth, flops / rate
    seconds = max(weights + kv, compute, launch)
    if seconds == weights + kv:
        limit: Limit = "weights" if weights >= kv else "kv"
    else:
        limit = "compute" if seconds == compute else "launch"
    return StepTime(seconds, weights, kv, compute, limit)


def seconds_per_token(step: float, *, tokens_per_forward: float = 1.0) -> float:
    """Seconds between two tokens of a text, of forwards of ``step`` seconds that yield ``tokens_per_forward`` each: 1, or what speculation makes of it."""
    _positive(tokens_per_forward=tokens_per_forward)
    return step / tokens_per_forward


def tokens_per_second(step: float, *, batch: int = 1, tokens_per_forward: float = 1.0) -> float:
    """Tokens a second of all texts of a batch together."""
    _positive(step=step)
    return batch * tokens_per_forward / step


def ridge(rate: float, bandwidth: float) -> float:
    """FLOPs for each byte read at which arithmetic takes as long as reading; below it memory is the limit.

    H100 SXM: 989 TFLOP/s over 3.35 TB/s are 295 FLOP/byte; H200, with 4.8 TB/s, 206.
    """
    _positive(rate=rate, bandwidth=bandwidth)
    return rate / bandwidth


def intensity(tokens: float, *, bytes_per_weight: float = 2.0) -> float:
    """FLOPs for each byte of weights in a forward over ``tokens`` new tokens: 2 · tokens / bytes; in 16 bits the number of tokens itself."""
    _positive(bytes_per_weight=bytes_per_weight)
    return 2 * tokens / bytes_per_weight


def largest_batch(ridge: float, *, nodes: int = 1, bytes_per_weight: float = 2.0) -> int:
    """The most texts whose forwards over ``nodes`` positions each still wait for memory: batch · nodes ≤ ridge · bytes / 2. 0: none.

    A tree of 60 nodes at a ridge of 295 takes 4; weights in 4 bits quarter it, since there is a quarter of the reading to hide behind.
    """
    _positive(nodes=nodes)
    return math.floor(ridge / intensity(nodes, bytes_per_weight=bytes_per_weight))


def texts_in_memory(memory_bytes: float, *, weight_bytes: float, kv_bytes_per_token: float, context: int) -> int:
    """The most texts of ``context`` tokens whose keys and values fit beside the weights; 0 where not one does."""
    _positive(kv_bytes_per_token=kv_bytes_per_token, context=context)
    return max(0, math.floor((memory_bytes - weight_bytes) / (kv_bytes_per_token * context)))


def _positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name}={number}; expected a number above 0")
