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


COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 64.0, "original_max_position_embeddings": 32}
# Each decoder that the engine describes, and each switch of the description in both positions.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama with scaled rope, tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with yarn, bias and one key head": (
        "Llama", {"rope_parameters": YARN, "attention_bias": True, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "mistral with a window": ("Mistral", {"sliding_window": 6}),
    "qwen2 with a bias": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows above": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma3": ("Gemma3", {
        "head_dim": 24, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24, "tie_word_embeddings": True,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    }),
    "mixtral with a window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
}  # fmt: skip


def _decoder(name: str, **more: Any) -> Any:
    """A tiny model of ``DECODERS``, scaled as the shared Llama is, so that a fault of any part changes its logits by far more than rounding."""
    import torch
    import transformers

    family, config = DECODERS[name]
    torch.manual_seed(0)
    named = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, named)(**{**COMMON, **config, **more}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in part:
                parameter.copy_(noise / 8 if model.config.tie_word_embeddings else noise)  # a head of this size gives logits near 1
            elif parameter.ndim >= 2:
                parameter.copy_(0.16 * noise)
            elif "norm" in part:
                parameter.copy_(0.5 + 1.5 * torch.rand(parameter.shape, generator=generator) - int(family == "Gemma3"))
            else:
                parameter.copy_(noise)
    return model.float().eval()


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., Any]:
    return _decoder


@pytest.fixture(scope="session", params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Any:
    """One model after the other; not to be changed."""
    return _decoder(request.param)


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    """The torch runner of a transformers model."""

    def make(model: Any, **more: Any) -> Any:
        from assay.ops.decode.forward import TorchRunner
        from assay.ops.decode.weights import weights_of

        return TorchRunner(*weights_of(model), **more)

    return make


@pytest.fixture(scope="session")
def full_logits() -> Callable[[Any, list[int]], Any]:
    """Logits of a text by transformers, without a cache."""

    def forward(model: Any, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    return forward
