"""A teacher whose next token depends smoothly on the text, and students that can learn it in a few dozen steps."""

from collections.abc import Callable
from typing import Any

import pytest


def make_teacher(*, vocab: int = 64, hidden: int = 32, layers: int = 3, seed: int = 0, tied: bool = False) -> Any:
    """A Llama of moderate weights: distributions of about 2.5 nats, which its last block changes by a part."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
            tie_word_embeddings=tied, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, 1 if not tied else 0.4)
            elif "lm_head" in name:
                parameter.normal_(0, 0.35)
            elif parameter.ndim >= 2:
                parameter.mul_(6)
    return model.float().eval().requires_grad_(True)


@pytest.fixture(scope="session")
def teacher_of() -> Callable[..., Any]:
    return make_teacher


@pytest.fixture(scope="session")
def text() -> Callable[..., Any]:
    """Windows of random ids [windows, length], by seed."""
    import torch

    def make(windows: int, length: int = 24, *, vocab: int = 64, seed: int = 0) -> Any:
        return torch.randint(3, vocab, (windows, length), generator=torch.Generator().manual_seed(seed))

    return make
