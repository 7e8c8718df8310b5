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
    """Proposes the true greedy continuation of each text, made wrong at the place where each round is to be rejected."""

    def __init__(self, truth: list[list[int]], accept: list[list[int]], vocabulary: int = 128) -> None:
        self.truth, self.script, self.vocabulary = truth, [list(row) for row in accept], vocabulary
        self.settled: list[list[int]] = []

    def check(self, requests, *, vocabulary) -> None: ...

    def begin(self, requests, *, vocabulary: int) -> None: ...

    def propose(self, requests, counts, *, sampling):
        from assay.ops.decode.drafts import NOTHING, Proposal

        proposals = []
        for truth, script, request, count in zip(self.truth, self.script, requests, counts, strict=True):
            if request.done:
                proposals.append(NOTHING)
                continue
            at, accept = len(request.text) - request.start, script.pop(0)
            found = truth[at : at + count]
            if accept < len(found):
                found[accept] = (found[accept] + 1) % self.vocabulary
            proposals.append(Proposal(found, None))
        return proposals

    def settle(self, accepted: list[int]) -> None:
        self.settled.append(list(accepted))


@pytest.fixture
def scripted_draft() -> Callable[..., ScriptedDraft]:
    return ScriptedDraft


@pytest.fixture
def record_forwards() -> Callable[[Any], list]:
    """Collect of every forward of a runner, by row: the positions whose logits were kept, and these logits."""

    def watch(runner: Any) -> list:
        seen: list = []
        forward = runner.forward

        def recorded(cache, step):
            logits = forward(cache, step)
            rows: dict[int, tuple[list[int], Any]] = {}
            for row in sorted(set(step.rows[step.keep].tolist())):
                mine = step.rows[step.keep] == row
                rows[row] = (step.positions[step.keep][mine].tolist(), logits[mine].clone())
            seen.append(rows)
            return logits

        runner.forward = recorded
        return seen

    return watch


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    """The torch runner of a transformers model."""

    def make(model: Any, **more: Any) -> Any:
        from assay.ops.decode.forward import TorchRunner
        from assay.ops.decode.weights import weights_of

        return TorchRunner(*weights_of(model), **more)

    return make
