"""Steps that round weights and activations, and those that prepare for it: one frozen spec per step kind. Not here: how any is done (``ops``)."""

from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from assay.schemas.spec import Spec
from assay.schemas.texts import Calibration

Rounding = Literal["int8", "int4", "int3", "int2", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4", "nf4", "ternary"]
GroupSize = int | Literal["tensor", "block"]
GROUPS: dict[str, GroupSize] = {
    "fp8_e4m3": -1,
    "fp8_e5m2": -1,
    "mxfp8": 32,
    "mxfp4": 32,
    "nvfp4": 16,
    "nf4": 64,
    "ternary": "tensor",
}  # integers: 64
BLOCK = 128  # rows and columns that share a scale with group_size: block
FIXED_GROUPS = ("mxfp8", "mxfp4", "nvfp4")


class Grid(Spec):
    """What numbers are rounded to: a number type, and who shares a scale."""

    format: Rounding
    group_size: GroupSize | None = Field(
        default=None,
        description="weights per scale along a row; -1 is a row, tensor the whole weight, block 128 × 128 of it; left out, what the format is known for",
    )
    symmetric: bool = Field(default=True, description="integers: no zero point")
    shared_exponent: Literal["floor", "ceil", "even"] = Field(default="floor", description="mxfp4, mxfp8: the rule of the scale's exponent")
    nested: bool = Field(default=False, description="nf4: scales in eight bits themselves (double quantization)")

    @field_validator("group_size")
    @classmethod
    def sized(cls, size: GroupSize | None) -> GroupSize | None:
        if isinstance(size, int) and size != -1 and not 8 <= size <= 65_536:
            raise ValueError(f"got {size}; expected a whole number from 8 to 65,536, -1, which is one group a row, or tensor or block")
        return size

    @model_validator(mode="after")
    def possible(self) -> "Grid":
        usual, size = GROUPS.get(self.format, 64), self.group_size
        if size is None:
            object.__setattr__(self, "group_size", usual)
        elif self.format in FIXED_GROUPS and size != usual:
            raise ValueError(f"group_size {size}, but {self.format} is defined by groups of {usual}; leave it out")
        elif size == "block" and self.format not in ("fp8_e4m3", "fp8_e5m2"):
            raise ValueError(f"group_size block, which is for fp8_e4m3 and fp8_e5m2; {self.format} takes a number of weights, -1 or tensor")
        if not self.format.startswith("int") and not self.symmetric:
            raise ValueError(f"symmetric: false with {self.format}, which has no zero point; int8, int4, int3 and int2 have")
        if self.nested and self.format != "nf4":
            raise ValueError(f"nested scales with {self.format}; only nf4 has them")
        if self.shared_exponent != "floor" and not self.format.startswith("mx"):
            raise ValueError(f"shared_exponent with {self.format}; only mxfp4 and mxfp8 share an exponent")
        return self


class Gptq(Spec):
    """How GPTQ goes through a model."""

    act_order: Literal["none", "static", "index"] = Field(
        default="static",
        description="columns of the largest inputs first: with the scales fixed before (static), or with the group of each column stored (index)",
    )
    damping_pct: int = Field(default=1, ge=1, le=100, description="percent of the Hessian's mean diagonal that is added to it")
    true_sequential: bool = Field(default=True, description="within a block, later layers see the inputs that rounded earlier ones give")
    propagate: bool = Field(default=True, description="blocks see the outputs of rounded blocks, not of the original ones")


class Inputs(Spec):
    """Rounded activations: the inputs of every packed layer of the blocks."""

    format: Literal["int8", "int4", "fp8_e4m3"]
    per: Literal["token", "tensor"] = Field(
        default="token", description="each token finds its scale, or one scale is fixed on the calibration text"
    )
    symmetric: bool = True
    clip_pct: int = Field(default=100, ge=10, le=100, description="percent of the range that is kept")

    @model_validator(mode="after")
    def possible(self) -> "Inputs":
        if self.format.startswith("fp8") and not self.symmetric:
            raise ValueError("symmetric: false with fp8_e4m3, which has no zero point; int8 and int4 have")
        return self


class Mixed(Spec):
    """Formats chosen layer by layer within a budget: the least sum of measured harm, the KL of the output with one layer rounded."""

    millibits: int = Field(ge=1_000, le=16_000, description="the budget: mean bits of a weight, scales included, times a thousand")
    formats: tuple[Rounding, ...] = Field(
        default=("int8", "int4", "int3", "int2"),
        min_length=2,
        max_length=8,
        strict=False,  # a list: `Quantize.named` has made it one of Python's
    )
    windows: int = Field(
        default=2, ge=1, le=256, description="the first of the calibration text, on which harm is measured; that of gptq by the others"
    )

    @field_validator("formats")
    @classmethod
    def once(cls, formats: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({each for each in formats if formats.count(each) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} twice; each format is named once")
        return formats


class Quantize(Grid):
    """Round the weights of the linear layers, and the activations if that is asked."""

    kind: Literal["quantize"] = "quantize"
    method: Literal["rtn", "gptq", "hqq", "llm_int8", "e8", "additive"] = Field(
        default="rtn", description="e8 and additive are vector quantization; llm_int8 keeps the columns of large inputs in 16 bits"
    )
    format: Rounding = Field(default="int4", description="what weights are rounded to; needed, but for llm_int8, e8, additive and mixed")
    range: Literal["minmax", "mse", "percentile", "output_mse"] = Field(
        default="minmax",
        description="how much of its range a group keeps: all, what errs least in the weights, a share of them, or what errs least in outputs",
    )
    keep_permille: int = Field(
        default=999, ge=500, le=1000, description="range: percentile: of a group's weights, this many in a thousand are in range"
    )
    embeddings: Literal["skip", "quantize"] = Field(default="skip", description="the input embedding")
    head: Literal["skip", "quantize", "untie"] = Field(
        default="skip", description="the output head; of a tied head, `quantize` needs embeddings: quantize, `untie` quantizes a copy"
    )
    inputs: Inputs | None = None
    gptq: Gptq | None = Field(default=None, description="only for method: gptq")
    mixed: Mixed | None = Field(default=None, description="formats by layer, in the place of format")
    calibration: Calibration | None = Field(default=None, description="for what looks at inputs; 16 windows of 512 tokens when left out")

    @model_validator(mode="before")
    @classmethod
    def named(cls, data: object) -> object:
        """A format to validate by where the method or ``mixed`` stands for it."""
        if isinstance(data, dict) and data.get("format") is None:
            if data.get("mixed") is not None:
                return {**data, "format": "int4"}
            if data.get("method") in OWN_FORMATS:
                return {**data, "format": OWN_FORMATS[data["method"]]}
            raise ValueError(f"needs format, one of {', '.join(get_args(Rounding))}, or mixed")
        return data

    @model_validator(mode="after")
    def fitting(self) -> "Quantize":
        if self.gptq is not None and self.method != "gptq":
            raise ValueError(f"gptq: … with method: {self.method}; leave it out, or say method: gptq")
        if self.gptq is None and self.method == "gptq":
            object.__setattr__(self, "gptq", Gptq())
        if self.gptq and self.gptq.act_order == "index" and self.group_size in (-1, "tensor", "block"):
            shared = {-1: "one scale a row", "tensor": "one scale a weight", "block": "scales of blocks"}[self.group_size]
            raise ValueError(f"act_order index with {shared}, which has no groups of columns to index; say static or none")
        if self.range != "minmax" and self.method not in ("rtn", "gptq"):
            raise ValueError(f"range: {self.range} with method: {self.method}, which finds its own; only rtn and gptq take a range")
        if self.keep_permille != 999 and self.range != "percentile":
            raise ValueError(f"keep_permille with range: {self.range}; only range: percentile keeps a share")
        if self.method == "llm_int8" and self.inputs is not None:
            raise ValueError(
                "inputs with method: llm_int8, whose kept columns are for inputs that are not rounded; leave inputs out, or say rtn"
            )
        own = Quantize.model_construct(format=OWN_FORMATS.get(self.method, "int4"), group_size=64)
        given = [key for key in ("format", "group_size", "symmetric") if getattr(self, key) != getattr(own, key)]
        if self.method in ("e8", "additive") and given:
            raise ValueError(f"{given[0]} with method: {self.method}, which has codes of its own, two bits a weight; leave it out")
        if self.mixed is not None and self.format != "int4":
            raise ValueError(f"format: {self.format} and mixed, which chooses formats by layer; say formats in mixed alone")
        if self.mixed is not None and self.method not in ("rtn", "gptq"):
            raise ValueError(f"mixed with method: {self.method}; rtn and gptq round to formats that differ by layer")
        if self.method == "hqq" and (self.format in FIXED_GROUPS or self.nested):
            raise ValueError(f"method: hqq moves scales freely, and those of {self.format} cannot be; integers, fp8 and plain nf4 can")
        if (self.embeddings, self.head) != ("skip", "skip") and (self.method in OWN_FORMATS or self.mixed is not None):
            what = "mixed" if self.mixed is not None else f"method: {self.method}"
            raise ValueError(f"embeddings or head with {what}, which rounds the blocks alone; leave them out")
        calibrated = self.calibrated
        if self.calibration is not None and not calibrated:
            raise ValueError(f"calibration with method: {self.method} and range: {self.range}, which look at no text; leave it out")
        if calibrated and self.calibration is None:
            object.__setattr__(self, "calibration", Calibration())
        if self.mixed and self.calibration and self.mixed.windows > self.calibration.windows:
            raise ValueError(f"mixed on {self.mixed.windows} windows of a calibration text of {self.calibration.windows}; at most as many")
        if self.mixed and self.method == "gptq" and self.calibration and self.mixed.windows == self.calibration.windows:
            raise ValueError(
                f"mixed on all {self.mixed.windows} windows of the calibration text; gptq needs others, since it harms text least that it was fitted to"
            )
        return self

    @property
    def calibrated(self) -> bool:
        """Whether the step looks at text."""
        static = self.inputs is not None and self.inputs.per == "tensor"
        return self.method in ("gptq", "llm_int8", "e8", "additive") or self.range == "output_mse" or self.mixed is not None or static


OWN_FORMATS = {"llm_int8": "int8", "e8": "int2", "additive": "int2"}  # what stands for a format where the method has its own


class Smooth(Grid):
    """Scale channels between layers, without a change of the logits, so that what follows rounds better: by SmoothQuant or by AWQ."""

    kind: Literal["smooth"] = "smooth"
    method: Literal["smoothquant", "awq"]
    format: Rounding = Field(
        default="int4", description="awq: what the weights are going to be rounded to, and group_size and symmetric with it"
    )
    alpha_pct: int = Field(
        default=50, ge=0, le=100, description="smoothquant: how much of the inputs' range goes into the weights, percent"
    )
    duo_scaling: bool = Field(default=True, description="awq: divide by the weights' size as well")
    salience: Literal["inputs", "weights"] = Field(default="inputs", description="awq: by what channels are scaled; weights is the control")
    calibration: Calibration = Calibration()

    @model_validator(mode="after")
    def fitting(self) -> "Smooth":
        """What the other method alone reads would make the same step under another name."""
        if self.method == "awq" and self.alpha_pct != 50:
            raise ValueError("alpha_pct with method: awq, which searches for it; only smoothquant takes it")
        usual = Smooth.model_construct(method="smoothquant", group_size=64)
        given = [key for key in SEARCHED if getattr(self, key) != getattr(usual, key)]
        if self.method == "smoothquant" and given:
            raise ValueError(f"{given[0]} with method: smoothquant, which rounds nothing to find its scales; only awq takes it")
        return self


SEARCHED = ("format", "group_size", "symmetric", "shared_exponent", "nested", "duo_scaling", "salience")


class Rotate(Spec):
    """Turn the hidden states by an orthogonal matrix that the weights take in, without a change of the logits, so that no channel stands out."""

    kind: Literal["rotate"] = "rotate"
    method: Literal["hadamard", "random", "spinquant"] = Field(
        default="hadamard", description="Hadamard with random signs, random orthogonal, or learned from a Hadamard on the calibration text"
    )
    online: tuple[Literal["down", "o", "qk"], ...] = Field(
        default=(), description="also at run time: before down_proj, before o_proj, and of queries and keys for a quantized cache"
    )
    steps: int = Field(default=40, ge=1, le=10_000, description="spinquant: of learning")
    inputs: Inputs | None = Field(default=None, description="spinquant: what it learns to round; int4 per token when left out")
    calibration: Calibration | None = Field(default=None, description="spinquant: the text that it learns on")

    @model_validator(mode="after")
    def fitting(self) -> "Rotate":
        learned = self.method == "spinquant"
        if not learned and (self.calibration or self.inputs):
            raise ValueError(f"calibration or inputs with method: {self.method}, which learns nothing; only spinquant does")
        if not learned and self.steps != 40:
            raise ValueError(f"steps with method: {self.method}, which learns nothing; only spinquant does")
        if self.inputs is not None and self.inputs.per == "tensor":
            raise ValueError("inputs per tensor, whose range changes with every turn; spinquant learns with inputs per token")
        if learned and self.calibration is None:
            object.__setattr__(self, "calibration", Calibration(windows=16, length=256))
        if learned and self.inputs is None:
            object.__setattr__(self, "inputs", Inputs(format="int4"))
        return self
