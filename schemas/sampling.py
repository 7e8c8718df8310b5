"""How a protocol lets tokens be drawn: the parameters of ``ops/decode/sampling.py``, with their ranges. Not here: what they do."""

from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, field_validator

from assay.schemas.spec import Spec

Bias = tuple[Annotated[int, Field(ge=0, le=10_000_000)], Annotated[float, Field(ge=-1000, le=1000)]]


class SamplingSpec(Spec):
    """From logits to the distribution that a token is drawn from; greedy unless a temperature is given. Numbers are taken as they are written."""

    temperature: float = Field(default=0.0, ge=0, le=10, description="divides the logits; 0 is greedy, 1 the model's own distribution")
    top_k: int = Field(default=0, ge=0, le=10_000_000, description="0 keeps all")
    top_p: float = Field(default=1.0, gt=0, le=1, description="above 0, at most 1, which keeps all")
    min_p: float = Field(default=0.0, ge=0, le=1, description="a share of the largest probability; 0 keeps all")
    typical_p: float = Field(default=1.0, gt=0, le=1, description="above 0, at most 1, which keeps all")
    repetition_penalty: float = Field(default=1.0, gt=0, le=100, description="above 0, at most 100; 1 changes nothing")
    presence_penalty: float = Field(default=0.0, ge=-100, le=100, description="nats off a token that has occurred")
    frequency_penalty: float = Field(default=0.0, ge=-100, le=100, description="nats off a token for each time that it has occurred")
    logit_bias: tuple[Bias, ...] = Field(default=(), max_length=10_000, description="pairs of an id and what is added to its logit")
    count_prompt: bool | None = Field(
        default=None, description="whether penalties count the prompt; left out, the repetition penalty does and the others do not"
    )
    order: Literal["transformers", "vllm"] = Field(default="transformers", description="whose order of the steps")

    @field_validator("logit_bias")
    @classmethod
    def an_id_once(cls, pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        twice = next((token for token, times in Counter(token for token, _ in pairs).items() if times > 1), None)
        if twice is not None:
            raise ValueError(f"the id {twice} has more than one bias; expected one value an id")
        return pairs

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn, so that a seed does not matter."""
        return self.temperature == 0 or self.top_k == 1
