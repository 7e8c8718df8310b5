"""How tasks are asked, one spec per suite: multiple choice, generated answers, needles, anything of the harness. Not here: asking or judging (``ops/tasks``)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from assay.schemas.sampling import SamplingSpec
from assay.schemas.spec import Distinct, Dtype, Spec
from assay.schemas.texts import Text

ChoiceTask = Literal["piqa", "hellaswag", "commonsense_qa", "openbook_qa", "boolq", "mmlu"]
GenerationTask = Literal["asdiv", "graded_arithmetic", "instructions", "ifbench", "humaneval"]
NeedleKind = Literal["single", "multiple", "hops"]

QUESTIONS = Field(
    default=100, ge=2, le=1_000_000, description="of each task, the first so many of its file in the order that `order` draws"
)
ORDER = Field(default=0, ge=0, lt=2**31, description="draws which questions are asked; other ones are another protocol")
CHAT = Field(default=False, description="puts each prompt into the tokenizer's chat template")


class Choice(Spec):
    """Accuracy, by likelihood and by likelihood a byte, and the probability of the listed options, on packaged multiple-choice questions."""

    suite: Literal["choice"] = "choice"
    tasks: Distinct[ChoiceTask] = Field(default=("piqa", "hellaswag", "commonsense_qa", "openbook_qa", "boolq", "mmlu"))
    questions: int = QUESTIONS
    shots: int = Field(default=0, ge=0, le=32, description="solved questions before each")
    chat: bool = CHAT
    batch: int = Field(default=16, ge=1, le=1024, description="questions side by side; their options are read from one prompt")
    order: int = ORDER
    dtype: Dtype = "float32"


class LmEval(Spec):
    """Any tasks of lm-evaluation-harness, by its names or from a directory of its YAML files, scored by its own metrics."""

    suite: Literal["lm_eval"] = "lm_eval"
    tasks: Distinct[Annotated[str, Field(min_length=1, max_length=200)]] = Field(max_length=1000)
    include: str | None = Field(default=None, description="a directory of task files, relative to the experiment's file")
    questions: int | None = Field(default=None, ge=1, le=10_000_000, description="of each task; all when left out")
    shots: int | None = Field(default=None, ge=0, le=100, description="as each task says when left out")
    chat: bool = CHAT
    batch: int = Field(default=16, ge=1, le=1024)
    seed: int = Field(default=0, ge=0, lt=2**31)
    dtype: Dtype = "float32"


class Generation(Spec):
    """Generated answers judged by a program: number problems, graded arithmetic, verifiable instructions, code. By greedy decoding, or n samples."""

    suite: Literal["generation"] = "generation"
    tasks: Distinct[GenerationTask] = Field(default=("asdiv", "graded_arithmetic", "instructions"))
    questions: int = QUESTIONS
    shots: int = Field(default=4, ge=0, le=32, description="solved questions before each, of the tasks that have any")
    reasoning: bool = Field(
        default=False, description="whether solved questions show their steps, so that the model writes its own (asdiv)"
    )
    chat: bool = CHAT
    sampling: SamplingSpec = SamplingSpec()
    samples: int = Field(default=1, ge=1, le=10_000, description="of each question")
    ks: Distinct[Annotated[int, Field(ge=1, le=10_000)]] = Field(default=(1,), max_length=32, description="of pass@k and maj@k")
    max_new_tokens: int = Field(default=128, ge=1, le=131_072)
    batch: int = Field(default=16, ge=1, le=1024, description="texts side by side")
    order: int = ORDER
    seed: int = Field(default=0, ge=0, lt=2**31, description="of the samples; the same questions are asked with any")
    dtype: Dtype = "float32"

    @model_validator(mode="after")
    def enough_samples(self) -> "Generation":
        if max(self.ks) > self.samples:
            raise ValueError(f"ks has {max(self.ks)}, and a question has samples = {self.samples}; draw {max(self.ks)}, or leave it out")
        if self.sampling.greedy and self.samples > 1:
            raise ValueError(f"samples = {self.samples} of greedy decoding are all the same; leave samples out, or give a temperature")
        return self


class Needle(Spec):
    """Whether keys that stand in a long text are found again: one, several, or a chain of them, at declared lengths and depths."""

    suite: Literal["needle"] = "needle"
    kinds: Distinct[NeedleKind] = Field(default=("single", "multiple", "hops"))
    lengths: Distinct[Annotated[int, Field(ge=64, le=131_072)]] = Field(
        default=(256, 512, 1024), max_length=32, description="tokens of the whole prompt, at most"
    )
    depths_pct: Distinct[Annotated[int, Field(ge=0, le=100)]] = Field(
        default=(0, 25, 50, 75, 100), max_length=101, description="where the needle stands"
    )
    prompts: int = Field(default=4, ge=1, le=10_000, description="of each kind, length and depth")
    keys: int = Field(default=4, ge=2, le=100, description="keys in a prompt of kind multiple, links in one of kind hops: keys // 2")
    haystack: Text = Text(name="essays")
    chat: bool = CHAT
    max_new_tokens: int = Field(default=16, ge=1, le=1024)
    batch: int = Field(default=8, ge=1, le=1024)
    order: int = ORDER
    dtype: Dtype = "float32"
