"""Steps that train: recovery toward the base, and of a draft toward its target. Not here: how (``ops/train``)."""

from typing import Literal

from pydantic import Field, model_validator

from assay.schemas.rounding import Quantize
from assay.schemas.spec import Spec
from assay.schemas.texts import Text

Divergence = Literal["forward_kl", "reverse_kl", "total_variation", "jensen_shannon"]


class Training(Spec):
    """What every run is said by. A step reads ``batch`` rows of ``length`` tokens."""

    tokens: int = Field(ge=1, le=1_000_000_000_000, description="positions trained on; whole steps, so rounded up")
    batch: int = Field(default=8, ge=1, le=4096, description="rows a step")
    length: int = Field(default=256, ge=16, le=131_072, description="tokens in a row")
    learning_rate: float = Field(default=5e-4, gt=0, le=1, description="the highest, above 0, after the warm-up; then half a cosine")
    warmup_pct: int = Field(default=5, ge=0, le=90, description="percent of the steps in which the learning rate rises")
    text: Text = Text(name="wikipedia_train")


class Domain(Spec):
    """One of several texts that a run reads."""

    text: Text
    share_pct: int = Field(ge=1, le=99, description="percent of the rows that are read from it at first")

    @property
    def called(self) -> str:
        """The text in a word, under which its facts are."""
        return self.text.name or self.text.path or f"{self.text.hub}/{self.text.file}"


class MixedTexts(Training):
    """A run that may read several texts, in the place of one."""

    domains: tuple[Domain, ...] | None = Field(
        default=None,
        exclude_if=lambda domains: domains is None,  # a step without them has the key that it had before there were any
        description="in the place of text: several; at each evaluation those whose loss is furthest above the base's are read more",
    )

    @model_validator(mode="after")
    def mixable(self) -> "MixedTexts":
        if self.domains is None:
            return self
        called = [domain.called for domain in self.domains]
        if len(called) < 2:
            raise ValueError(f"domains has {len(called) or 'no'} text; two or more were expected, or one as text")
        twice = next((name for name in called if called.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"domains has {twice} twice; each text once was expected")
        total = sum(domain.share_pct for domain in self.domains)
        if total != 100:
            raise ValueError(f"the share_pct of domains add up to {total}; 100 was expected")
        if self.text != type(self).model_fields["text"].default:
            raise ValueError("text beside domains, which are read in its place; leave one of them out")
        return self


class Taught(Training):
    """A run toward a teacher."""

    on_policy_pct: int = Field(default=0, ge=0, le=100, description="percent of the rows that go on with the student's own samples")
    temperature: float = Field(default=1.0, gt=0, le=100, description="above 0; of both distributions in the loss")


class DraftDistill(Taught):
    """Train a draft toward its target, on text, on its own samples, or both (DistillSpec)."""

    loss: Divergence = Field(default="forward_kl", description="named (teacher, student); total variation is one minus the acceptance rate")
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


class Lora(Spec):
    """Train low-rank adapters of the blocks' linear layers alone, and merge them at the end."""

    rank: int = Field(ge=1, le=4096)
    alpha: int = Field(default=16, ge=1, le=65_536, description="the adapters' product counts alpha / rank times")


class Distill(Taught, MixedTexts):
    """Train the weights as they are by now toward the base, on text, on the student's own samples, or both. Zeros that pruning made stay zero."""

    kind: Literal["distill"] = "distill"
    loss: Divergence | Literal["cross_entropy"] = Field(
        default="forward_kl", description="named (teacher, student); cross_entropy knows no teacher and is the control"
    )
    beta_pct: int = Field(default=50, ge=0, le=100, description="jensen_shannon: the teacher's weight in the mixture")
    cross_entropy_pct: int = Field(default=0, ge=0, le=99, description="percent of the loss that is cross-entropy beside the divergence")
    hidden_pct: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="the weight of the distance of hidden states, percent of the loss: each block that is left against the one that it was",
    )
    teacher: Literal["model", "states", "top_k"] = Field(
        default="states",
        description="run beside the student, its final states from the cache, or its likeliest tokens from the cache (biased)",
    )
    top_k: int | None = Field(default=None, ge=1, le=100_000, description="teacher: top_k: how many tokens a position keeps")
    lora: Lora | None = None

    @model_validator(mode="after")
    def fitting(self) -> "Distill":
        if self.beta_pct != 50 and self.loss != "jensen_shannon":
            raise ValueError(f"beta_pct with loss: {self.loss}; only jensen_shannon mixes")
        if (self.top_k is None) == (self.teacher == "top_k"):
            raise ValueError(f"top_k {'is needed with' if self.top_k is None else 'without'} teacher: top_k")
        needs = [name for name in ("on_policy_pct", "hidden_pct") if getattr(self, name)]
        if needs and self.teacher != "model" and self.loss != "cross_entropy":
            raise ValueError(f"{needs[0]} needs the teacher itself beside the student; say teacher: model")
        if self.loss == "cross_entropy":
            given = [
                name
                for name, usual in (
                    ("on_policy_pct", 0),
                    ("cross_entropy_pct", 0),
                    ("hidden_pct", 0),
                    ("temperature", 1.0),
                    ("teacher", "states"),
                )
                if getattr(self, name) != usual
            ]
            if given:
                raise ValueError(f"{given[0]} with loss: cross_entropy, which knows no teacher and no samples; leave it out")
        if self.teacher == "top_k" and self.loss != "forward_kl":
            raise ValueError(f"teacher: top_k with loss: {self.loss}; what is kept of the teacher allows forward_kl alone")
        return self


class PruneLearned(MixedTexts):
    """Learn what to remove: gates on layers, groups of heads, and channels are trained with the weights until so much is left, then cut (Sheared LLaMA)."""

    kind: Literal["prune_learned"] = "prune_learned"
    layers: int | None = Field(default=None, ge=1, le=1000, description="how many are left; without a number all are, and have no gate")
    kv_groups: int | None = Field(default=None, ge=1, le=1024, description="groups of heads left in each layer, with their query heads")
    ffn: int | None = Field(default=None, ge=1, le=1_000_000, description="channels left inside each feed-forward layer")
    hidden: int | None = Field(default=None, ge=1, le=1_000_000, description="channels left of the residual stream")
    gate_rate: float = Field(default=0.3, gt=0, le=10, description="the highest learning rate of gates and multipliers")
    target_warmup_pct: int = Field(
        default=40, ge=0, le=90, description="percent of the steps in which the wanted sizes fall from all to these"
    )

    @model_validator(mode="after")
    def something(self) -> "PruneLearned":
        if self.layers is self.kv_groups is self.ffn is self.hidden is None:
            raise ValueError("nothing to learn: give at least one of layers, kv_groups, ffn, hidden")
        return self


class Pretrain(Training):
    """A small Llama of this shape from nothing, with the base's tokenizer, trained on the next token. What is before it is not looked at."""

    kind: Literal["pretrain"] = "pretrain"
    layers: int = Field(ge=1, le=1000)
    hidden: int = Field(ge=2, le=65_536)
    heads: int = Field(ge=1, le=1024)
    kv_heads: int = Field(ge=1, le=1024)
    ffn: int | None = Field(default=None, ge=1, le=1_000_000, description="channels inside each feed-forward layer")
    parameters: int | None = Field(
        default=None, ge=1, le=10**12, description="in the place of ffn: its largest multiple of 8 with no more weights in all"
    )
    tied: bool = Field(default=True, description="embedding and head are one matrix")

    @model_validator(mode="after")
    def sized(self) -> "Pretrain":
        if (self.ffn is None) == (self.parameters is None):
            raise ValueError(f"one of ffn and parameters is needed; got {'none' if self.ffn is None else 'both'}")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(f"hidden {self.hidden} in {self.heads} heads; an even number of channels a head was expected")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads on kv_heads {self.kv_heads}; a divisor of {self.heads} was expected")
        return self
