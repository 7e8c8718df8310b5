"""What every suite is given and gives back, and how it opens what it measures. Not here: any measuring."""

import builtins
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple


class Subject(NamedTuple):
    """What is measured: a checkpoint and how it is run. ``draft``: (method, tokens, ngram, its checkpoint, its KV format)."""

    checkpoint: Path
    kv_format: str | None
    draft: tuple[str, int, int | None, Path | None, str | None] | None
    base: Path


class Result(NamedTuple):
    """Rows of facts and of items, pictures (PNG), and what else is worth telling (JSON). See :func:`metric` for the keys of ``metrics``."""

    metrics: list[dict[str, Any]]
    items: list[dict[str, Any]]
    pictures: dict[str, builtins.bytes]
    notes: dict[str, Any]


def metric(name: str, value: float | None, unit: str, n: int, standard_error: float | None = None, **more: Any) -> dict[str, Any]:
    """One row; a value of None is ``not_finite`` unless ``status`` says otherwise."""
    return {
        "metric": name, "slice_kind": "all", "slice": "all", "value": value, "unit": unit, "n": n, "standard_error": standard_error,
        "status": "ok" if value is not None else "not_finite", "message": None, "threads": None, "path": None, "other_cpu_share": None, **more,
    }  # fmt: skip


def ratio_metric(name: str, found: tuple[float | None, float | None], n: int, path: str, *, message: str, **more: Any) -> dict[str, Any]:
    value, error = found
    return metric(name, value, "1", n, error, path=path, **{**more, "message": message if value is None else None})


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@lru_cache(maxsize=2)  # a target and its draft; protocols of one variant come one after another
def model_of(checkpoint: Path, dtype: str) -> Any:
    import torch

    from assay.ops.models.checkpoint import load_model

    return load_model(checkpoint, dtype=getattr(torch, dtype), device=device())


@lru_cache(maxsize=2)
def tokenizer_of(checkpoint: Path) -> Any:
    from assay.ops.models.checkpoint import load_tokenizer

    return load_tokenizer(checkpoint)


def prompts_of(protocol: Any, tokenizer: Any, count: int, length: int, experiment_dir: Path | None) -> list[list[int]]:
    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import prompts

    return prompts(tokenizer, documents(**protocol.text.model_dump(), directory=experiment_dir), count, length).tolist()


def eos_ids(model: Any) -> frozenset[int]:
    """All ids that end a text, by the generation config."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or ())


def draft_of(subject: Subject, dtype: str) -> Any:
    from assay.ops.decode.drafts import ModelDraft, NGramDraft

    if subject.draft is None:
        raise ValueError("acceptance is measured of a variant with a draft; this one has none")
    method, _, ngram, checkpoint, kv_format = subject.draft
    if method == "ngram":
        assert ngram is not None
        return NGramDraft(ngram)
    assert checkpoint is not None
    return ModelDraft(model_of(checkpoint, dtype), kv_format=kv_format)
