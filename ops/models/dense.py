"""Normal checkpoints: safetensors, config and tokenizer files in a directory, opened and written as they are.

Weight steps read and write through this file. Not here: quantized checkpoints (``ops/models/checkpoint.py`` opens any), or where a base
comes from (``ops/models/bases.py``).
"""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

RUNTIME_KEY = "assay"  # where config.json says what runs beside the weights
PRUNED_KEY = "assay_pruned"  # where it says that weights of the blocks were set to zero, and are to stay so
OWN_FILE = "assay.safetensors"  # weights that say nothing alone: a loader that does not know what else is needed finds none, and says so
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken",
)  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no load reports of transformers inside; what matters in them is checked and raised."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def positions(directory: Path) -> int | None:
    """How many tokens a model has positions for, by its config; None where that does not say."""
    config = read_config(directory)
    config = config.get("text_config") or config
    return next((int(config[name]) for name in ("n_positions", "max_position_embeddings", "n_ctx") if config.get(name)), None)


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint in ``directory``.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no config.json, so it is no checkpoint; a directory written by save_pretrained was expected"
        )
    return json.loads(path.read_text())


def weights_path(directory: Path) -> str:
    """How the weights of a checkpoint are run: ``dense``, or ``dequantized`` from a quantized file."""
    return "dequantized" if read_config(directory).get("quantization_config") else "dense"


def require_dense(directory: Path, what: str, *, runtime: bool = False) -> None:
    """Refuse a quantized parent, and one that needs more than its weights to be run.

    Args:
        runtime: take the latter.
    Raises:
        ValueError: ``what`` (a step) was put after a quantization, whose packed integers it cannot change, or after a rotation that goes on at run time.
    """
    config = read_config(directory)
    found = config.get("quantization_config")
    if RUNTIME_KEY in config and not found and not runtime:
        raise ValueError(f"{what} reads weights alone, but its parent is rotated with online transforms; put {what} before the rotation")
    if found:
        raise ValueError(
            f"{what} changes dense weights, but its parent is already quantized ({found.get('quant_method', 'unknown method')}, "
            f"{found.get('format', 'unknown format')}); put {what} before the quantization, or quantize once"
        )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted by name.

    Raises:
        FileNotFoundError: there are none; only safetensors are ever read, since a pickle can run code.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in Path(directory).glob(pattern))
        beside = f" (but {', '.join(others)})" if others else ""
        raise FileNotFoundError(
            f"{directory} holds no .safetensors file{beside}; only safetensors are read. "
            "A checkpoint saved by model.save_pretrained(directory) works"
        )
    return files


def load_dense(directory: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Open a normal checkpoint for evaluation: SDPA attention, no code from the checkpoint, every weight accounted for.

    Args:
        dtype: of the weights in memory; as stored when None.
    Raises:
        FileNotFoundError: no config or no safetensors in ``directory``.
        ValueError: weights are missing from the file, left over in it, or of another shape.
    """
    said, files = read_config(directory), weight_files(directory)
    if RUNTIME_KEY in said:
        return from_state(
            directory, {name: tensor for file in files for name, tensor in load_file(file).items()}, dtype=dtype, device=device
        )
    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            directory, dtype=dtype or "auto", attn_implementation="sdpa", use_safetensors=True, local_files_only=True,
            trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    require_complete(info, directory)
    return move(model, device=device).eval()


def from_state(
    directory: Path, state: dict[str, Tensor], *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The model that the config in ``directory`` describes, with these weights; as :func:`load_dense` otherwise.

    Raises:
        ValueError: weights are missing, left over, or of another shape.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    with quiet():
        model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(  # type: ignore[union-attr]
            None, config=config, state_dict=state, dtype=dtype or stored_dtype(directory), attn_implementation="sdpa", output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
        if (Path(directory) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    require_complete(info, directory)
    return move(model, device=device).eval()


def move(model: PreTrainedModel, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> PreTrainedModel:
    """``model`` in another dtype or on another device, in place. Buffers that are no part of a checkpoint, such as the frequencies of positions, keep
    their dtype, as they do when it is opened in that dtype.
    """
    kept = (
        {}
        if dtype is None
        else {(part, name): part._buffers[name] for part in model.modules() for name in part._non_persistent_buffers_set}
    )
    model.to(dtype=dtype, device=device)  # type: ignore[call-arg]
    for (part, name), buffer in kept.items():
        part._buffers[name] = None if buffer is None else buffer.to(device)
    return model


def require_complete(info: dict[str, Any], directory: Path) -> None:
    """Refuse what transformers only reports: a missing weight is initialized at random, and an unexpected one is dropped."""
    problems = {
        "missing from the file (they would be random)": sorted(info["missing_keys"]),
        "in the file but not in the model": sorted(info["unexpected_keys"]),
        "of another shape than the config says": sorted(
            str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"]
        ),
    }
    found = [f"{len(names)} {what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" for what, names in problems.items() if names]
    if found:
        raise ValueError(f"the weights in {directory} do not fit its config: {'; '.join(found)}")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Raises:
        FileNotFoundError: the checkpoint has no tokenizer files.
    """
    if not any(next(Path(directory).glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise FileNotFoundError(
            f"{directory} holds no tokenizer files; tokenizer.json and tokenizer_config.json were expected beside its config.json"
        )
    with quiet():
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse NaN and infinity.

    Raises:
        ValueError: names the first tensor that has any, and how many.
    """
    for name, tensor in tensors:
        if tensor.is_floating_point() and not (finite := tensor.isfinite()).all():
            raise ValueError(
                f"{name} has {int((~finite).sum()):,} of {tensor.numel():,} values that are NaN or infinite; only finite weights are written"
            )


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | Path | None, directory: Path) -> None:
    """Write a normal checkpoint; the same model gives the same bytes.

    Args:
        tokenizer: to be saved, or the directory of a checkpoint whose tokenizer files are copied unchanged, or none.
    Raises:
        ValueError: a weight is not finite (named).
    """
    check_finite(model.state_dict().items())
    write_tokenizer(tokenizer, directory)
    write_weights(model, directory)


def write_weights(model: PreTrainedModel, directory: Path, state: dict[str, Tensor] | None = None) -> None:
    """Config, generation config and safetensors of ``model``, or of ``state`` in its place, readable by whoever can read the config."""
    keep_greedy(model)
    with quiet():
        model.save_pretrained(directory, state_dict=state)
    for path in weight_files(directory):  # they are written for their owner alone
        path.chmod((Path(directory) / "config.json").stat().st_mode)


def keep_greedy(model: PreTrainedModel) -> None:
    """Drop sampling numbers of a generation config that does not sample: published models have them, and saving them is refused."""
    config = model.generation_config
    if config is not None and not config.do_sample:
        for number in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"):
            if getattr(config, number, None) is not None:
                setattr(config, number, None)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase | Path | None, directory: Path) -> None:
    """Save ``tokenizer``, or copy the tokenizer files of another checkpoint byte by byte."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, Path):
        for pattern in TOKENIZER_FILES:
            for path in sorted(tokenizer.glob(pattern)):
                shutil.copyfile(path, Path(directory) / path.name)
    elif tokenizer is not None:
        tokenizer.save_pretrained(directory)


def stored_dtype(directory: Path) -> torch.dtype:
    """The dtype that a checkpoint's weights are stored in, by its config; float32 when it names none."""
    config = read_config(directory)
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
