"""What can be done to a model: the kinds of steps together, and the runtime steps. Not here: how a step is done (``ops``) or whether it fits a base.

*Weight steps* make a checkpoint (``pruning.py``, ``training.py``, ``rounding.py``); *runtime steps* configure how one is run. Counts are whole numbers.
"""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from assay.schemas.pruning import Pack, PruneDepth, PruneExperts, PruneWeights, PruneWidth
from assay.schemas.rounding import Grid, Quantize, Rotate, Smooth
from assay.schemas.spec import BaseName, Name, Spec
from assay.schemas.training import Distill, DraftDistill, Pretrain, PruneLearned


class Kv(Spec):
    """Store keys and values in fewer bits: fp8_e4m3 with unit scale, or int8 with one scale per token and head."""

    kind: Literal["kv"] = "kv"
    format: Literal["fp8_e4m3", "int8"]


class DraftModel(Spec):
    """The model that a draft step needs made before it can run: the node between target and draft. Files say it as a part of ``draft``."""

    kind: Literal["draft_model"] = "draft_model"
    early_exit: int | None = None
    distill: DraftDistill | None = None


class Draft(Spec):
    """Speculate: ``tokens`` proposals a round, from an n-gram of the text so far, another variant or the target's first blocks, verified exactly."""

    kind: Literal["draft"] = "draft"
    method: Literal["ngram", "variant"]
    tokens: int = Field(default=4, ge=1, le=64, description="proposed tokens a round")
    adapt_cost: float | None = Field(
        default=None,
        ge=0,
        le=10,
        description="adapt the proposals of a round, up to `tokens`, to the acceptance so far; a draft step's time over a target step's",
    )
    ngram: int | None = Field(default=None, ge=1, le=16, description="longest suffix looked up; 3 when left out; only for method: ngram")
    variant: dict[Name, Name] | None = Field(
        default=None, description="method: variant: the option on each axis; axes left out take their empty option"
    )
    base: BaseName | None = Field(default=None, description="method: variant: another base as the draft")
    early_exit: int | None = Field(
        default=None, ge=1, le=1000, description="method: variant: the target's first blocks with its own norm and head, as the draft"
    )
    distill: DraftDistill | None = Field(default=None, description="method: variant: train the draft toward its target first")

    @model_validator(mode="after")
    def one_source(self) -> "Draft":
        if self.method == "ngram":
            if self.variant is not None or self.base is not None:
                raise ValueError("method: ngram takes no variant and no base; use method: variant for a model draft")
            if self.early_exit is not None or self.distill is not None:
                given = "distill" if self.early_exit is None else "early_exit"
                raise ValueError(f"method: ngram takes no {given}, since it has no model; use method: variant for a model draft")
            if self.ngram is None:
                object.__setattr__(self, "ngram", 3)
        else:
            if self.ngram is not None:
                raise ValueError("method: variant takes no ngram; leave it out, or use method: ngram")
            given = [key for key in ("variant", "base", "early_exit") if getattr(self, key) is not None]
            if len(given) != 1:
                raise ValueError(
                    "method: variant needs one of variant (axis: option) and base (a name), or early_exit (a number of blocks) in their place; "
                    f"it has {' and '.join(given) or 'none of them'}"
                )
        return self

    @property
    def made(self) -> DraftModel | None:
        """The model that is made for this draft alone; None where the draft is an n-gram or a model that there is anyway."""
        if self.early_exit is None and self.distill is None:
            return None
        return DraftModel(early_exit=self.early_exit, distill=self.distill)


def rounding_of(step: object) -> Grid | None:
    """What ``step`` rounds weights to: a quantize step, or pruning that rounds what stays; None where it rounds none."""
    return step if isinstance(step, Quantize) else step.quantize if isinstance(step, PruneWeights) else None


RewriteStep = PruneDepth | PruneWidth | PruneExperts | PruneWeights | Pack | Smooth | Rotate | Quantize  # in one pass
TrainedStep = Pretrain | PruneLearned | Distill
WeightStep = RewriteStep | TrainedStep
RuntimeStep = Kv | Draft
Step = Annotated[WeightStep | RuntimeStep, Field(discriminator="kind")]

WEIGHT_STEPS: tuple[type, ...] = get_args(WeightStep)
RUNTIME_STEPS: tuple[type, ...] = get_args(RuntimeStep)
STEP_KINDS: tuple[str, ...] = tuple(step.model_fields["kind"].default for step in (*WEIGHT_STEPS, *RUNTIME_STEPS))
