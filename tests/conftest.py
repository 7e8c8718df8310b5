"""Fixtures that several folders of tests share: tiny models that do depend on positions, saved and not."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _scaled_llama(*, vocab=128, hidden=64, ffn=128, layers=4, heads=4, kv_heads=2, tied=False, seed=0, **config) -> Any:
    """A Llama whose weights are large enough that a wrong position or a stale cache row changes its logits (by 8, not by 1e-3)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, tie_word_embeddings=tied, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            **config,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim >= 2:
                parameter.mul_(8)
            else:
                parameter.copy_(0.5 + 1.5 * torch.rand(parameter.shape, generator=generator))
    return model.float().eval()


@pytest.fixture
def make_llama() -> Callable[..., Any]:
    return _scaled_llama


@pytest.fixture
def tl8() -> Any:
    """Llama, vocabulary 128, hidden 64, FFN 128, 4 layers, 4 heads, 2 KV heads, untied, fp32."""
    return _scaled_llama()


def save_with_tokenizer(model: Any, directory: Path) -> Path:
    """Save ``model`` with a tokenizer that has one id a byte (the ids 0 to 2 are pad, bos, eos)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = [chr(code) for code in range(32, 127)] + ["Ġ", "Ċ", "ĉ"]
    words = dict.fromkeys(["<pad>", "<s>", "</s>", *alphabet])
    vocabulary = {token: index for index, token in enumerate(words) if index < model.config.vocab_size}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return directory


@pytest.fixture
def save_checkpoint_dir() -> Callable[[Any, Path], Path]:
    return save_with_tokenizer


@pytest.fixture
def tl8_dir(tl8: Any, tmp_path: Path) -> Path:
    return save_with_tokenizer(tl8, tmp_path / "tl8")
