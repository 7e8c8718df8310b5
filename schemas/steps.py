"""What can be done to a model: one frozen spec per step kind. Not here: how a step is done (``ops``) or whether it fits a base.

*Weight steps* make a checkpoint; *runtime steps* configure how one is run. Counts are whole numbers.
"""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from assay.schemas.spec import BaseName, Commit, HubId, Name, Spec


class Text(Spec):
    """Tokens of a text: a packaged corpus by name, a local file (.txt, or .jsonl with a ``text`` field), or a parquet file of a hub data set."""

    name: Name | None = Field(default=None, description="a packaged text: wikipedia, wikipedia_train, essays, mathematics, python_code")
    path: str | None = Field(default=None, description="a .txt or .jsonl file; relative to the experiment file")
    hub: HubId | None = Field(default=None, description="a hub data set, org/name, with revision, file and column")
    revision: Commit | None = Field(default=None, description="a commit of 40 hexadecimal digits")
    file: str | None = Field(default=None, description="a parquet file of the hub data set")
    column: str = "text"

    @model_validator(mode="after")
    def one_source(self) -> "Text":
        given = [key for key in ("name", "path", "hub") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"a text has one of name, path, hub; got {' and '.join(given) or 'none of them'}")
        if self.hub and not (self.revision and self.file):
            raise ValueError("a hub text needs revision (a 40-digit commit) and file (a parquet file of the data set)")
        return self


class Calibration(Spec):
    """The text that a step looks at: ``windows`` windows of ``length`` tokens."""

    text: Text = Text(name="wikipedia_train")
    windows: int = Field(default=16, ge=1, le=4096)
    length: int = Field(default=512, ge=16, le=131_072, description="tokens in a window")


class PruneDepth(Spec):
    """Remove whole blocks: those of least Block Influence, or the contiguous run whose input and output are the closest in angle."""

    kind: Literal["prune_depth"] = "prune_depth"
    layers: int = Field(ge=1, le=1000, description="how many blocks to remove")
    score: Literal["block_influence", "angular"] = "block_influence"
    calibration: Calibration = Calibration()


class Quantize(Spec):
    """Round the weights of the linear layers to integer codes that share a scale per group."""

    kind: Literal["quantize"] = "quantize"
    method: Literal["rtn"] = "rtn"
    format: Literal["int8", "int4", "int3", "int2"]
    group_size: int = Field(default=64, description="weights per scale along a row; -1 is one group a row")
    symmetric: bool = True
    embeddings: Literal["skip", "quantize"] = Field(default="skip", description="the input embedding")
    head: Literal["skip", "quantize", "untie"] = Field(
        default="skip", description="the output head; of a tied head, `quantize` needs embeddings: quantize, `untie` quantizes a copy"
    )

    @field_validator("group_size")
    @classmethod
    def possible(cls, size: int) -> int:
        if size != -1 and not 8 <= size <= 65_536:
            raise ValueError(f"got {size}; expected a whole number from 8 to 65,536, or -1, which is one group a row")
        return size


class Kv(Spec):
    """Store keys and values in fewer bits: fp8_e4m3 with unit scale, or int8 with one scale per token and head."""

    kind: Literal["kv"] = "kv"
    format: Literal["fp8_e4m3", "int8"]


class Distill(Spec):
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
    quantize: Quantize | None = Field(default=None, description="how the draft is rounded after training, a quantize step")


class DraftModel(Spec):
    """The model that a draft step needs made before it can run: the node between target and draft. Files say it as a part of ``draft``."""

    kind: Literal["draft_model"] = "draft_model"
    early_exit: int | None = None
    distill: Distill | None = None


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
    distill: Distill | None = Field(default=None, description="method: variant: train the draft toward its target first")

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


WeightStep = PruneDepth | Quantize
RuntimeStep = Kv | Draft
Step = Annotated[WeightStep | RuntimeStep, Field(discriminator="kind")]

WEIGHT_STEPS: tuple[type, ...] = get_args(WeightStep)
RUNTIME_STEPS: tuple[type, ...] = get_args(RuntimeStep)
STEP_KINDS: tuple[str, ...] = tuple(step.model_fields["kind"].default for step in (*WEIGHT_STEPS, *RUNTIME_STEPS))
