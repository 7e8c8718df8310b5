"""Steps that remove weights: single ones, whole blocks, widths, experts; and that stores what is left. Not here: how any is done (``ops/prune``)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from assay.schemas.rounding import Grid
from assay.schemas.spec import Spec
from assay.schemas.texts import Calibration

WIDTHS = ("kv_groups", "heads_per_group", "ffn", "hidden")  # what a width step can cut


class PruneDepth(Spec):
    """Remove whole blocks: those of least influence or whose absence harms least, one contiguous run, any (the control), or those that are named."""

    kind: Literal["prune_depth"] = "prune_depth"
    layers: int = Field(ge=1, le=1000, description="how many blocks to remove")
    score: Literal["block_influence", "angular", "perplexity", "random", "listed"] = Field(
        default="block_influence",
        description="angular removes the run whose ends are the closest in angle; perplexity one block after another, whose absence costs least",
    )
    tokens: Literal["last", "all"] | None = Field(default=None, description="angular: at which tokens of a window; last when left out")
    listed: tuple[Annotated[int, Field(ge=0, le=999)], ...] | None = Field(
        default=None, description="listed: which blocks, from 0; as many as layers says"
    )
    calibration: Calibration = Calibration()

    @model_validator(mode="after")
    def fitting(self) -> "PruneDepth":
        if (self.listed is None) == (self.score == "listed"):
            raise ValueError(
                f"listed and score: listed go together; got score: {self.score} and listed: {list(self.listed or ()) or 'nothing'}"
            )
        if self.listed is not None and (list(self.listed) != sorted(set(self.listed)) or len(self.listed) != self.layers):
            raise ValueError(
                f"listed is {list(self.listed)} and layers {self.layers}; expected each block once, the first before, and as many as layers"
            )
        if self.tokens is not None and self.score != "angular":
            raise ValueError(f"tokens with score: {self.score}, which reads every token; only angular takes it")
        return self


class PruneWeights(Spec):
    """Set single weights of the linear layers to zero: a share of them, or N:M, some of each few along the inputs. Later steps keep them zero."""

    kind: Literal["prune_weights"] = "prune_weights"
    method: Literal["magnitude", "wanda", "sparsegpt"]
    sparsity_pct: int | None = Field(default=None, ge=1, le=99, description="percent of the weights; a whole number, counted exactly")
    pattern: Literal["2:4", "4:8"] | None = Field(default=None, description="2:4 keeps two of each four along the inputs")
    scope: Literal["layer", "row", "global"] | None = Field(
        default=None, description="magnitude: what is ranked together; layer when left out"
    )
    damping_pct: int = Field(default=1, ge=1, le=100, description="sparsegpt: percent of the Hessian's mean diagonal that is added to it")
    calibration: Calibration | None = Field(default=None, description="wanda, sparsegpt: the text that they look at")
    quantize: Grid | None = Field(
        default=None,
        exclude_if=lambda grid: grid is None,  # what is not asked for is not said, so that what was built before it could be keeps its key
        description="sparsegpt: what the weights that stay are rounded to in the same loop; the step then packs, as a quantize step does",
    )

    @model_validator(mode="after")
    def fitting(self) -> "PruneWeights":
        if (self.sparsity_pct is None) == (self.pattern is None):
            raise ValueError(f"one of sparsity_pct and pattern is needed; got {'none' if self.pattern is None else 'both'}")
        if self.scope is not None and (self.method != "magnitude" or self.pattern is not None):
            raise ValueError("scope is for method: magnitude with sparsity_pct; wanda ranks within rows, and a pattern within its groups")
        if self.damping_pct != 1 and self.method != "sparsegpt":
            raise ValueError(f"damping_pct with method: {self.method}, which has no Hessian; only sparsegpt takes it")
        if self.quantize is not None and self.method != "sparsegpt":
            raise ValueError(
                f"quantize with method: {self.method}, which changes no weight that stays; a quantize step after it rounds them"
            )
        size, width = (self.quantize and self.quantize.group_size), int((self.pattern or ":1").partition(":")[2])
        if isinstance(size, int) and size % width and size != -1:
            raise ValueError(
                f"group_size {size} of quantize is no whole number of groups of {width} ({self.pattern}); a multiple of {width} works"
            )
        if self.method == "magnitude" and self.calibration is not None:
            raise ValueError("calibration with method: magnitude, which looks at no text; leave it out")
        if self.method != "magnitude" and self.calibration is None:
            object.__setattr__(self, "calibration", Calibration())
        return self


class PruneWidth(Spec):
    """Cut widths to what is named, the same in every layer, so that a plain config describes the result. What is left out stays."""

    kind: Literal["prune_width"] = "prune_width"
    kv_groups: int | None = Field(
        default=None, ge=1, le=1024, description="groups of heads that share keys and values, kept with their query heads"
    )
    heads_per_group: int | None = Field(default=None, ge=1, le=1024, description="query heads kept in each group")
    ffn: int | None = Field(default=None, ge=1, le=1_000_000, description="channels kept inside the feed-forward layers")
    hidden: int | None = Field(default=None, ge=1, le=1_000_000, description="channels kept of the residual stream")
    over_tokens: Literal["mean", "l2"] = Field(default="mean", description="how activations are summed up over the tokens of a window")
    over_windows: Literal["l2", "mean"] = Field(default="l2", description="and then over the windows")
    correct_norms: bool = Field(
        default=True,
        description="hidden: gains of norms times √(kept / before), exact where the channels that go are zero; false leaves them",
    )
    heads_by: Literal["activation", "retrieval", "induction", "sink", "random"] = Field(
        default="activation", description="what heads and groups are ranked by: the size of their outputs, or a score of the screen `heads`"
    )
    cut: Literal["least", "most"] = Field(default="least", description="most removes the heads that score highest: what should not be done")
    protect: int = Field(default=0, ge=0, le=10_000, description="of each score of the screen, so many heads of the model stay")
    calibration: Calibration = Calibration()

    @model_validator(mode="after")
    def fitting(self) -> "PruneWidth":
        if all(getattr(self, name) is None for name in WIDTHS):
            raise ValueError(f"nothing to cut: give at least one of {', '.join(WIDTHS)}")
        if not self.correct_norms and self.hidden is None:
            raise ValueError("correct_norms without hidden, which alone changes what norms divide by; leave it out")
        if self.kv_groups is None and self.heads_per_group is None:
            given = [key for key, usual in (("heads_by", "activation"), ("cut", "least"), ("protect", 0)) if getattr(self, key) != usual]
            if given:
                raise ValueError(f"{given[0]} where no heads are cut; give kv_groups or heads_per_group with it")
        if self.protect and (self.cut == "most" or self.heads_by != "activation"):
            raise ValueError("protect is for cutting the least active heads; with another heads_by or cut it would contradict it")
        return self


class PruneExperts(Spec):
    """Keep ``experts`` experts of each mixture, and drop or merge the others."""

    kind: Literal["prune_experts"] = "prune_experts"
    experts: int = Field(ge=1, le=100_000, description="how many experts of each layer are kept")
    method: Literal["frequency", "output_norm", "merge"] = Field(
        default="output_norm",
        description="by how often they are chosen, by the size of what they add (REAP), or merged into the most alike that is kept",
    )
    calibration: Calibration = Calibration()


class Pack(Spec):
    """Store 2:4 weights, or their int8 codes, as what is left of them and where it was; after it no weight changes."""

    kind: Literal["pack"] = "pack"
    pattern: Literal["2:4"] = "2:4"
