"""What a variant reads and multiplies: from its facts where it was measured, else from the base's shape and its steps, or a reason why that cannot be told.

Not here: what that comes to in time (``ops/cost/plan.py``).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from assay.ops.cost.bytes import DTYPE_BYTES, kv_bytes_per_token
from assay.ops.cost.plan import Footprint
from assay.ops.cost.shape import Decoder
from assay.schemas.base import Base, Shape
from assay.schemas.devices import ModelShape
from assay.schemas.pruning import Pack, PruneDepth, PruneWeights, PruneWidth
from assay.schemas.rounding import Grid, Quantize, Rotate, Smooth
from assay.schemas.steps import Draft, Kv, Step
from assay.schemas.training import Distill
from assay.schemas.widths import left

NEEDED = (
    "size_bytes",
    "step_weight_bytes",
    "block_parameters",
    "head_parameters",
    "attention_flops_per_context_token",
    "kv_bytes_per_token",
)


class Unknown(NamedTuple):
    """That a footprint cannot be told without building the variant, and why."""

    why: str


def measured_footprint(facts: Mapping[str, float], steps: Sequence[Step]) -> Footprint | None:
    """From the facts of the suites ``bytes`` and ``acceptance``; None where the first has not measured all that is needed."""
    if any(name not in facts for name in NEEDED):
        return None
    draft = steps[-1] if steps and isinstance(steps[-1], Draft) else None
    return Footprint(
        facts["size_bytes"], facts["step_weight_bytes"], facts["block_parameters"] + facts["head_parameters"],
        facts["attention_flops_per_context_token"], facts["kv_bytes_per_token"], facts.get("tokens_per_round") if draft else 1.0,
        draft.tokens if draft else 0, facts.get("draft_step_weight_bytes", 0.0), facts.get("draft_matmul_parameters", 0.0),
        facts.get("draft_kv_bytes_per_token", 0.0),
    )  # fmt: skip


def predicted_footprint(base: Base, steps: Sequence[Step]) -> Footprint | Unknown:
    """From the shape of ``base`` and what each step does to it; norms and biases are left out.

    Acceptance is never guessed: a draft leaves ``tokens_per_forward`` open.
    """
    if base.shape is None:
        return Unknown(f"the shape of {base.name} is not known here")
    outside = 8.0 * DTYPE_BYTES[base.dtype]
    plan: dict[str, Any] = {"shape": base.shape, "bits": outside, "code": int(outside), "kv": "bfloat16", "draft": None}
    for step in steps:
        why = _take(plan, step)
        if why:
            return Unknown(why)
    shape, draft = decoder_of(plan["shape"]), plan["draft"]
    block = shape.block_parameters * plan["bits"] / 8
    return Footprint(
        block + (1 if shape.tied else 2) * shape.head_parameters * outside / 8, block + shape.head_parameters * outside / 8, shape.matmul_parameters,
        shape.attention_flops_per_context_token, kv_bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, plan["kv"]),
        None if draft else 1.0, draft.tokens if draft else 0,
    )  # fmt: skip


def decoder_of(shape: Shape) -> Decoder:
    gated = shape.gated if isinstance(shape, ModelShape) else True
    return Decoder(
        shape.layers, shape.hidden_size, shape.intermediate_size, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size, shape.tied, gated
    )  # fmt: skip


def _take(plan: dict[str, Any], step: Step) -> str | None:
    """Change ``plan`` as ``step`` does, or say why that cannot be told."""
    shape: Shape = plan["shape"]
    match step:
        case PruneDepth() | PruneWidth():
            plan["shape"] = left(step, shape)
        case PruneWeights() if step.quantize is not None:
            _round(plan, step.quantize)
        case PruneWeights() | Smooth() | Distill():
            pass  # what is stored keeps its size: zeros of a dense weight cost what other numbers do
        case Rotate() if not shape.tied:
            pass
        case Pack():
            from assay.ops.quantize.semi_structured import share_of_dense

            plan["bits"] -= plan["code"] * float(1 - share_of_dense(plan["code"]))  # scales stay
        case Quantize() if step.method in ("rtn", "gptq", "hqq") and (step.embeddings, step.head) == ("skip", "skip"):
            _round(plan, step)
            plan["bits"] = step.mixed.millibits / 1000 if step.mixed else plan["bits"]
        case Kv():
            plan["kv"] = step.format
        case Draft() if step.method == "ngram":
            plan["draft"] = step
        case Draft():
            return "its draft is a model, whose bytes are known once it is built"
        case _:
            return f"what {step.kind} leaves is known once it is built"
    return None


def _round(plan: dict[str, Any], grid: Grid) -> None:
    from assay.ops.quantize.grid import effective_bits
    from assay.ops.steps.quantize import format_of

    format, width = format_of(grid), plan["shape"].hidden_size
    plan["bits"], plan["code"] = effective_bits(format, width, width), format.bits
