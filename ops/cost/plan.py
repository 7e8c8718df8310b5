"""What a variant would take on a device: the time of a token, tokens a second, memory. Not here: where its footprint comes from, or which variant is wanted."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from assay.ops.cost.roofline import Limit, seconds_per_token, step_time, texts_in_memory, tokens_per_second
from assay.ops.cost.shape import decode_flops

Goal = Literal["latency", "throughput", "memory"]


class Footprint(NamedTuple):
    """What a forward of a variant reads and multiplies; with a draft, what its proposals take.

    ``tokens_per_forward`` is 1 without a draft and None where the acceptance of a draft has not been measured. Draft fields are 0 for an n-gram.
    """

    size_bytes: float  # of all that is stored, the draft's model included
    step_weight_bytes: float  # read once a forward
    matmul_parameters: float
    attention_flops_per_context_token: float
    kv_bytes_per_token: float
    tokens_per_forward: float | None = 1.0
    proposals: int = 0
    draft_weight_bytes: float = 0.0
    draft_parameters: float = 0.0
    draft_kv_bytes_per_token: float = 0.0


class Prediction(NamedTuple):
    """Seconds of a forward (with a draft: of a round), between two tokens of a text, tokens a second of the batch, and bytes in memory."""

    batch: int
    memory_bytes: float
    forward_seconds: float
    seconds_per_token: float | None
    tokens_per_second: float | None
    limit: Limit


def predict(
    footprint: Footprint, *, context: int, batch: int, bandwidth: Callable[[float], float], rate: float, launch: float = 0.0
) -> Prediction:
    """Decoding ``batch`` texts after ``context`` tokens each.

    Args:
        bandwidth: bytes a second of a reading of so many bytes.
        rate: FLOPs a second in the dtype of the arithmetic.
    Raises:
        ValueError: no text or no context.
    """
    if context < 1 or batch < 1:
        raise ValueError(f"context={context}, batch={batch}; expected 1 or more of both")
    width = bandwidth(footprint.step_weight_bytes)
    flops = decode_flops(
        footprint.matmul_parameters, footprint.attention_flops_per_context_token, tokens=batch * (footprint.proposals + 1), context=context
    )
    step = step_time(
        weight_bytes=footprint.step_weight_bytes, kv_bytes=batch * context * footprint.kv_bytes_per_token, flops=flops, bandwidth=width, rate=rate, launch=launch
    )  # fmt: skip
    seconds = step.seconds
    if footprint.draft_weight_bytes:
        proposal = step_time(
            weight_bytes=footprint.draft_weight_bytes, kv_bytes=batch * context * footprint.draft_kv_bytes_per_token,
            flops=2 * batch * footprint.draft_parameters, bandwidth=bandwidth(footprint.draft_weight_bytes), rate=rate, launch=launch,
        )  # fmt: skip
        seconds += footprint.proposals * proposal.seconds
    gained = footprint.tokens_per_forward
    return Prediction(
        batch, memory_bytes(footprint, context=context, batch=batch), seconds,
        None if gained is None else seconds_per_token(seconds, tokens_per_forward=gained),
        None if gained is None else tokens_per_second(seconds, batch=batch, tokens_per_forward=gained), step.limit,
    )  # fmt: skip


def memory_bytes(footprint: Footprint, *, context: int, batch: int) -> float:
    """Weights as stored, and keys and values of ``batch`` texts; activations and what an engine keeps beside are not counted."""
    return footprint.size_bytes + batch * context * (footprint.kv_bytes_per_token + footprint.draft_kv_bytes_per_token)


def batch_that_fits(footprint: Footprint, memory: float, *, context: int) -> int:
    """The most texts of ``context`` tokens that fit into ``memory`` bytes beside the weights; 0 where not one does."""
    token = footprint.kv_bytes_per_token + footprint.draft_kv_bytes_per_token
    return texts_in_memory(memory, weight_bytes=footprint.size_bytes, kv_bytes_per_token=token, context=context)


def order(prediction: Prediction, goal: Goal) -> float:
    """What is smaller for the better of two predictions; infinite where it is not known."""
    if goal == "memory":
        return prediction.memory_bytes
    known = prediction.seconds_per_token if goal == "latency" else prediction.tokens_per_second
    if known is None:
        return float("inf")
    return known if goal == "latency" else -known
