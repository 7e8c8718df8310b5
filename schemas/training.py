"""Steps that train: distillation toward the base, and of a draft toward its target. Not here: how (``ops/train``)."""

from typing import Literal

from pydantic import Field, model_validator

from assay.schemas.rounding import Quantize
from assay.schemas.spec import Spec
from assay.schemas.texts import Text


class DraftDistill(Spec):
    """Train a draft toward its target, on text, on its own samples, or both (DistillSpec). A step reads ``batch`` rows of ``length`` tokens."""

    loss: Literal["forward_kl", "reverse_kl", "total_variation", "jensen_shannon"] = Field(
        default="forward_kl", description="named (teacher, student); total variation is one minus the acceptance rate"
    )
    on_policy_pct: int = Field(default=0, ge=0, le=100, description="percent of the rows that go on with the draft's own samples")
    tokens: int = Field(ge=1, le=1_000_000_000_000, description="positions trained on; whole steps, so rounded up")
    batch: int = Field(default=8, ge=1, le=4096, description="rows a step")
    length: int = Field(default=256, ge=16, le=131_072, description="tokens in a row")
    learning_rate: float = Field(default=5e-4, gt=0, le=1, description="the highest, above 0, after the warm-up; then half a cosine")
    temperature: float = Field(default=1.0, gt=0, le=100, description="above 0; of both distributions in the loss")
    warmup_pct: int = Field(default=5, ge=0, le=90, description="percent of the steps in which the learning rate rises")
    text: Text = Text(name="wikipedia_train")
    quantize: Quantize | None = Field(
        default=None, description="how the draft is rounded after training, a quantize step that looks at no text"
    )

    @model_validator(mode="after")
    def rounded_blind(self) -> "DraftDistill":
        if self.quantize is not None and self.quantize.calibrated:
            raise ValueError(
                f"quantize by {self.quantize.method}, which looks at text; a draft is rounded by rtn or hqq with a range of the weights alone"
            )
        return self
