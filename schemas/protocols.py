"""How a variant is measured: one frozen spec per suite. Not here: the arithmetic (``ops/evaluate``) or which variants are measured."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from assay.schemas.sampling import SamplingSpec
from assay.schemas.spec import Distinct, Dtype, Spec
from assay.schemas.tasks import Choice, Generation, LmEval, Needle
from assay.schemas.texts import Text


class Divergence(Spec):
    """Per-token KL(base‖variant), total variation, top-1 agreement and perplexity, on windows of one text.

    Windows overlap by ``window - stride`` tokens and each target is scored once. ``bos: tokenizer`` puts the tokenizer's own BOS before each
    window if it adds one by itself.
    """

    suite: Literal["divergence"] = "divergence"
    text: Text = Text(name="wikipedia")
    tokens: int = Field(default=8192, ge=32, le=10_000_000, description="tokens read from the text")
    window: int = Field(default=512, ge=8, le=131_072)
    stride: int | None = Field(default=None, ge=1, description="window - 1 when left out: every target once, context from 1")
    bos: Literal["tokenizer", "never"] = "tokenizer"
    batch: int = Field(default=4, ge=1, le=1024, description="windows per forward")
    dtype: Dtype = "float32"

    @field_validator("stride")
    @classmethod
    def within_the_window(cls, stride: int | None, info: ValidationInfo) -> int | None:
        window = info.data.get("window")
        if stride is not None and window is not None and stride >= window:
            raise ValueError(f"got {stride}; expected less than window = {window}, or the first token of a window is never scored")
        return stride

    @model_validator(mode="after")
    def every_target_once(self) -> "Divergence":
        if self.stride is None:
            object.__setattr__(self, "stride", self.window - 1)
        return self


class Bytes(Spec):
    """Bytes of the packed tensors as stored, shared storage once; KV per token of context and the draft apart."""

    suite: Literal["bytes"] = "bytes"
    kv_dtype: Dtype = Field(default="bfloat16", description="what an unquantized KV cache would hold")


PromptKind = Literal["passage", "copy"]
PROMPT: Any = Field(
    default="passage", description="copy: the passage begins again in the last third of the prompt, so that to go on is to copy"
)


class Acceptance(Spec):
    """Speculation against plain decoding: same tokens when greedy, acceptance per position, tokens per round. Only for variants with a draft."""

    suite: Literal["acceptance"] = "acceptance"
    text: Text = Text(name="wikipedia")
    prompt: PromptKind = PROMPT
    prompts: int = Field(default=4, ge=1, le=10_000)
    prompt_tokens: int = Field(default=64, ge=4, le=131_072)
    new_tokens: int = Field(default=48, ge=2, le=131_072)
    sampling: SamplingSpec = SamplingSpec()
    seed: int = Field(default=0, ge=0, lt=2**31)
    dtype: Dtype = "float32"


class Speed(Spec):
    """Prefill and decode tokens/s apart: median of ``repeats`` after a warm-up; a variant with a draft is also timed without it."""

    suite: Literal["speed"] = "speed"
    text: Text = Text(name="wikipedia")
    prompt: PromptKind = PROMPT
    batch: int = Field(default=1, ge=1, le=1024)
    prompt_tokens: int = Field(default=64, ge=4, le=131_072, description="context before the first decoded token")
    prefill_tokens: int = Field(default=512, ge=4, le=131_072)
    new_tokens: int = Field(default=32, ge=2, le=131_072)
    repeats: int = Field(default=3, ge=1, le=1000)
    dtype: Dtype = "float32"


class Speculation(Spec):
    """What a draft's speed-up is made of: its cost, the acceptance, predicted and measured speed-up, and the batch at which it stops paying."""

    suite: Literal["speculation"] = "speculation"
    text: Text = Text(name="wikipedia")
    prompt: PromptKind = PROMPT
    prompt_tokens: int = Field(default=64, ge=4, le=131_072)
    new_tokens: int = Field(default=48, ge=2, le=131_072)
    batches: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(default=(1, 4), min_length=1, max_length=16, description="ascending")
    sampling: SamplingSpec = SamplingSpec()
    seed: int = Field(default=0, ge=0, lt=2**31)
    repeats: int = Field(default=3, ge=1, le=1000)
    dtype: Dtype = "float32"

    @field_validator("batches")
    @classmethod
    def ascending(cls, batches: tuple[int, ...]) -> tuple[int, ...]:
        if list(batches) != sorted(set(batches)):
            raise ValueError(f"got {list(batches)}; expected each once, the smallest first")
        return batches


class Distribution(Spec):
    """How spread the next-token distributions on a text are, and what temperatures and filters make of them: facts of a model, nothing is drawn."""

    suite: Literal["distribution"] = "distribution"
    text: Text = Text(name="wikipedia")
    tokens: int = Field(default=2048, ge=32, le=10_000_000, description="tokens read from the text")
    window: int = Field(default=512, ge=8, le=131_072)
    temperatures: Distinct[Annotated[float, Field(gt=0, le=10, description="above 0, at most 10")]] = Field(
        default=(0.5, 0.7, 1.0, 1.5), max_length=32
    )
    top_k: Distinct[Annotated[int, Field(ge=1, le=10_000_000)]] = Field(
        default=(10, 50, 1000), max_length=32, description="what lies beyond the k likeliest tokens is the tail"
    )
    batch: int = Field(default=4, ge=1, le=1024, description="windows per forward")
    dtype: Dtype = "float32"


class ConstrainedPrompt(Spec):
    """A prompt and the texts that may answer it: those that match ``regex`` as a whole, or the JSON that ``json_schema`` admits."""

    prompt: str = Field(min_length=1, max_length=100_000)
    regex: str | None = Field(default=None, max_length=10_000)
    json_schema: str | None = Field(default=None, max_length=100_000, description="as JSON text, since the order of its keys counts")
    expected: str | None = Field(default=None, min_length=1, max_length=1000, description="what a right answer says, as whole words")

    @model_validator(mode="after")
    def one_language(self) -> "ConstrainedPrompt":
        if (self.regex is None) == (self.json_schema is None):
            raise ValueError(f"a prompt takes one of regex and json_schema; this one has {'none' if self.regex is None else 'both'}")
        if self.json_schema is not None:
            try:
                schema = json.loads(self.json_schema)
            except ValueError as error:
                raise ValueError(f"json_schema is no JSON text: {error}") from None
            if not isinstance(schema, dict):
                raise ValueError('json_schema is no object; expected one, for instance {"type": "object"}')
        return self


class Constrained(Spec):
    """Masked sampling against the model's own distribution over the legal texts: exact where a language has at most ``exact_prefixes`` prefixes,
    otherwise by weighted draws; and greedy answers with and without the mask."""

    suite: Literal["constrained"] = "constrained"
    prompts: tuple[ConstrainedPrompt, ...] = Field(default=(), max_length=10_000, description="left out: a built-in set of short answers")
    template: Literal["plain", "chat"] = Field(default="plain", description="chat puts each prompt into the tokenizer's chat template")
    samples: int = Field(default=32, ge=1, le=100_000, description="draws a prompt, where its language is not enumerated")
    exact_prefixes: int = Field(default=256, ge=0, le=100_000, description="forwards that an enumeration may take; 0 never enumerates")
    temperature: float = Field(default=1.0, gt=0, le=10, description="of the model's distribution, with the mask and without")
    max_new_tokens: int = Field(default=32, ge=1, le=131_072, description="an answer that has not ended by then has no number")
    seed: int = Field(default=0, ge=0, lt=2**31)
    dtype: Dtype = "float32"


Operation = Literal["add", "subtract", "multiply"]


class Arithmetic(Spec):
    """pass@k, majority votes and unreadable answers of several samples a problem of generated arithmetic, at each temperature, judged exactly.

    Temperature 0 has one sample a problem, since all of them would be the same.
    """

    suite: Literal["arithmetic"] = "arithmetic"
    problems: int = Field(default=64, ge=2, le=100_000)
    digits: Distinct[Annotated[int, Field(ge=1, le=9)]] = Field(default=(1, 2), max_length=9, description="of both numbers; in turn")
    operations: Distinct[Operation] = Field(default=("add", "subtract", "multiply"), description="in turn")
    shots: int = Field(default=6, ge=0, le=64, description="solved problems before each; none of them is asked")
    samples: int = Field(default=8, ge=1, le=10_000, description="a problem and temperature")
    ks: Distinct[Annotated[int, Field(ge=1, le=10_000)]] = Field(default=(1, 4, 8), max_length=32, description="each at most samples")
    temperatures: Distinct[Annotated[float, Field(ge=0, le=10, description="from 0, which is greedy, to 10")]] = Field(
        default=(0.0, 0.7, 1.0), max_length=32, description="the first gives the facts without a slice"
    )
    sampling: SamplingSpec = Field(default=SamplingSpec(), description="filters and penalties; without a temperature")
    max_new_tokens: int = Field(default=12, ge=1, le=1024, description="an answer that has not ended by then is cut")
    seed: int = Field(default=0, ge=0, lt=2**31, description="of the problems and of the samples")
    dtype: Dtype = "float32"

    @field_validator("sampling")
    @classmethod
    def without_a_temperature(cls, sampling: SamplingSpec) -> SamplingSpec:
        if sampling.temperature != 0:
            raise ValueError(f"sampling has the temperature {sampling.temperature:g}; leave it out, and name it in temperatures")
        if sampling.top_k == 1:
            raise ValueError("top_k = 1 is greedy at every temperature; leave it out, and name 0 in temperatures")
        return sampling

    @model_validator(mode="after")
    def enough_samples_and_problems(self) -> "Arithmetic":
        if max(self.ks) > self.samples:
            raise ValueError(
                f"ks has {max(self.ks)}, and a problem has samples = {self.samples}; draw {max(self.ks)} samples, or leave it out"
            )
        grades, fewest = len(self.digits) * len(self.operations), (9 * 10 ** (min(self.digits) - 1)) ** 2
        if self.problems + self.shots > grades * fewest:
            raise ValueError(
                f"problems = {self.problems} and shots = {self.shots} in turn of {grades} grades; of {min(self.digits)}-digit numbers there "
                f"are {fewest} problems a grade, which makes {grades * fewest} at most"
            )
        return self


class Layers(Spec):
    """What rounding did to each layer: signal over noise, what was clipped, how far the largest weight stands out. Only for variants with packed weights."""

    suite: Literal["layers"] = "layers"


class Outliers(Spec):
    """How far activations stand out on a text: massive ones of the residual stream, channels of what linear layers read; and how little a block turns it."""

    suite: Literal["outliers"] = "outliers"
    text: Text = Text(name="wikipedia")
    windows: int = Field(default=4, ge=1, le=100_000)
    length: int = Field(default=512, ge=8, le=131_072, description="tokens a window")
    dtype: Dtype = "float32"


class Heads(Spec):
    """What each attention head does: copies from far, goes on with what came before, looks at the first token. By prompts that are made for it."""

    suite: Literal["heads"] = "heads"
    text: Text = Text(name="wikipedia")
    windows: int = Field(default=8, ge=1, le=1000)
    length: int = Field(
        default=256, ge=32, le=16_384, description="tokens a window; attention is kept whole, so memory grows with its square"
    )
    seed: int = 0
    dtype: Dtype = "float32"


class Zeros(Spec):
    """Which share of the blocks' weights is zero, by layer, and whether a declared pattern holds. Only for variants whose weights were pruned."""

    suite: Literal["zeros"] = "zeros"


class Recovery(Spec):
    """The curve of a training run: what the student had regained after so many tokens. Only for variants whose last weight step trains."""

    suite: Literal["recovery"] = "recovery"


Protocol = Annotated[
    Divergence
    | Bytes
    | Acceptance
    | Speed
    | Speculation
    | Constrained
    | Distribution
    | Arithmetic
    | Layers
    | Outliers
    | Heads
    | Zeros
    | Recovery
    | Choice
    | LmEval
    | Generation
    | Needle,
    Field(discriminator="suite"),
]
