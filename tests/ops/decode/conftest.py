"""Models and drafts of the decoding tests: a sliding-window Mistral whose cache faults show, and a draft that obeys a script."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def make_mistral() -> Callable[..., Any]:
    """A Mistral with every layer's window ``window`` tokens wide, scaled as the shared Llama is; ``attention`` picks the implementation."""

    def make(*, window: int = 6, layers: int = 4, seed: int = 0, attention: str = "sdpa") -> Any:
        import torch
        from transformers import MistralConfig, MistralForCausalLM

        torch.manual_seed(seed)
        model = MistralForCausalLM(
            MistralConfig(
                vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                sliding_window=window, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, attn_implementation=attention,
            )
        )  # fmt: skip
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "embed_tokens" in name:
                    parameter.copy_(torch.randn(parameter.shape))
                elif parameter.ndim >= 2:
                    parameter.mul_(8)
                else:
                    parameter.copy_(0.5 + 1.5 * torch.rand(parameter.shape))
        return model.float().eval()

    return make


class ScriptedDraft:
    """Proposes the true greedy continuation, made wrong at the place where each round is to be rejected."""

    def __init__(self, truth: list[int], accept: list[int], vocabulary: int = 128) -> None:
        self.truth, self.script, self.vocabulary, self.settled = truth, list(accept), vocabulary, []
        self.prompt_length = 0

    def check(self, prompt: list[int]) -> None: ...

    def begin(self, prompt: list[int], *, vocabulary: int) -> None:
        self.prompt_length = len(prompt)

    def propose(self, tokens, count, *, sampling, generator):
        from assay.ops.decode.drafts import Proposal

        at = len(tokens) - self.prompt_length
        found = self.truth[at : at + count]
        accept = self.script.pop(0)
        if accept < len(found):
            found[accept] = (found[accept] + 1) % self.vocabulary
        return Proposal(found, None)

    def settle(self, accepted: int) -> None:
        self.settled.append(accepted)


@pytest.fixture
def scripted_draft() -> Callable[..., ScriptedDraft]:
    return ScriptedDraft


@pytest.fixture
def record_forwards() -> Callable[[Any], list]:
    """Collect (first position, logits of the kept positions) of every forward that decoding makes of a model; those of a test itself give no positions."""

    def watch(model: Any) -> list:
        seen: list = []

        def hook(module, arguments, keywords, output):
            if "position_ids" not in keywords:
                return
            logits = output.logits[0].clone()
            last = int(keywords["position_ids"][0, -1])
            seen.append((last - len(logits) + 1, logits))

        model.register_forward_hook(hook, with_kwargs=True)
        return seen

    return watch
