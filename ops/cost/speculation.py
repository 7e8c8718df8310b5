"""Where speculation stops paying. Not here: what it brings (``ops/decode/acceptance.py`` has these closed forms), or what was measured of it."""

from assay.ops.decode.acceptance import best_gamma, expected_speedup, expected_tokens

__all__ = ["best_gamma", "break_even_acceptance", "break_even_batch", "expected_speedup", "expected_tokens", "speedup_at_batch"]


def break_even_acceptance(gamma: int, cost: float) -> float | None:
    """The acceptance α at which ``gamma`` proposals of a draft that costs ``cost`` of a target step win nothing: E(α) = γ c + 1.

    None where even α = 1 loses, which is at c ≥ 1. By bisection, to 1e-12; E rises with α.

    Raises:
        ValueError: ``gamma`` is below 1, or ``cost`` negative.
    """
    if gamma < 1:
        raise ValueError(f"gamma={gamma} proposals a round never win nor lose; expected 1 or more")
    if expected_speedup(1.0, gamma, cost) <= 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_speedup(middle, gamma, cost) <= 1 else (low, middle)
    return (low + high) / 2


def speedup_at_batch(alpha: float, gamma: int, cost: float, *, batch: int, ridge_tokens: float) -> float:
    """The speed-up of a batch of texts on a device where a forward over up to ``ridge_tokens`` tokens takes the time of reading the weights.

    Beyond that a forward takes time in proportion to its tokens: plain steps have ``batch``, verification batch · (γ + 1). The draft's step is taken to
    cost ``cost`` of a plain step at the same batch.

        E · plain / (γ · c · plain + verify),   plain = max(1, B / R),   verify = max(1, B (γ + 1) / R)
    """
    if batch < 1 or not ridge_tokens > 0:
        raise ValueError(f"batch={batch}, ridge_tokens={ridge_tokens}; expected 1 or more, and a number above 0")
    plain, verify = max(1.0, batch / ridge_tokens), max(1.0, batch * (gamma + 1) / ridge_tokens)
    return expected_tokens(alpha, gamma) * plain / (gamma * cost * plain + verify)


def break_even_batch(alpha: float, gamma: int, cost: float, *, ridge_tokens: float) -> int:
    """The smallest batch at which :func:`speedup_at_batch` is 1 or less; 1 where speculation never pays.

    There always is one: once plain steps are bound by arithmetic, a round does the work of γ + 1 of them and yields γ + 1 tokens at most.
    """
    low, high = 0, int(ridge_tokens) + 1
    while high - low > 1:  # the speed-up does not rise with the batch
        middle = (low + high) // 2
        low, high = (low, middle) if speedup_at_batch(alpha, gamma, cost, batch=middle, ridge_tokens=ridge_tokens) <= 1 else (middle, high)
    return high
