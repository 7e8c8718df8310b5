"""Fixtures that several folders of tests share: tiny models that do depend on positions, saved and not; and shapes checked at every call."""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _check_shapes_of_ops() -> None:
    """Check at every call under test the dtypes and shapes in the signatures of ``assay.ops``; has to run before those are imported."""
    from beartype import beartype
    from jaxtyping import _import_hook, install_import_hook

    def check(function: Any) -> Any:
        # Shapes alone, so that a test may pass a model of its own making where the signature names a class of transformers.
        said = getattr(function, "__annotations__", {})
        shapes = {name: hint for name, hint in said.items() if "jaxtyping." in repr(hint)}
        if isinstance(function, type) or not shapes:
            return function
        function.__annotations__ = shapes
        try:
            return beartype(function)
        finally:
            function.__annotations__ = said

    # jaxtyping's own loader marks byte code while a module runs, and with it all that the module imports: torch would be compiled anew.
    loader: Any = _import_hook._JaxtypingLoader
    loader.exec_module = SourceFileLoader.exec_module
    loader.get_code = lambda self, name: self.source_to_code(self.get_data(self.path), self.path)
    sys.modules["shapes_of_ops"] = SimpleNamespace(check=check)  # type: ignore[assignment]
    install_import_hook("assay.ops", "shapes_of_ops.check")


if os.environ.get("JAXTYPING_DISABLE", "0") == "0":
    _check_shapes_of_ops()


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """For tests of what an op itself says about arguments that its signature rules out."""
    from jaxtyping import config

    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def save_checkpoint_dir() -> Callable[[Any, Path], Path]:
    return save_with_tokenizer


@pytest.fixture
def tl8_dir(tl8: Any, tmp_path: Path) -> Path:
    return save_with_tokenizer(tl8, tmp_path / "tl8")


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
def full_logits() -> Callable[[Any, list[int]], Any]:
    """Logits of a text by transformers, without a cache."""

    def forward(model: Any, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    return forward
