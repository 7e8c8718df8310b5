"""What every suite is given and gives back, and how it opens what it measures. Not here: any measuring."""

import builtins
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from assay.ops.models.device import device
from assay.schemas.sampling import SamplingSpec

PER_TASK = 10_000_000  # between the numbers of the items of one task and those of the next, of suites that ask several


class DraftOf(NamedTuple):
    """How a subject is drafted for: ``checkpoint`` and its ``kv_format`` for a model, ``ngram`` else; ``adapt_cost`` where the proposals adapt."""

    method: str
    tokens: int
    ngram: int | None
    checkpoint: Path | None
    kv_format: str | None
    adapt_cost: float | None = None


class Subject(NamedTuple):
    """What is measured: a checkpoint, how it is run, and the base it belongs to."""

    checkpoint: Path
    kv_format: str | None
    draft: DraftOf | None
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


def mean_metric(name: str, values: Sequence[float], unit: str = "1", **more: Any) -> dict[str, Any]:
    """The mean of independent values, with its standard error s / √n; None of a single one."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return metric(name, fmean(values), unit, len(values), error, **more)


def mean_over_tasks(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One metric of several tasks as their unweighted mean; tasks are independent, so their errors add up as squares."""
    error = sum((row["standard_error"] or 0) ** 2 for row in rows) ** 0.5 / len(rows)
    name, unit, path = (rows[0][key] for key in ("metric", "unit", "path"))
    return metric(name, fmean(row["value"] for row in rows), unit, sum(row["n"] for row in rows), error, path=path)


def ratio_metric(name: str, found: tuple[float | None, float | None], n: int, path: str, *, message: str, **more: Any) -> dict[str, Any]:
    value, error = found
    return metric(name, value, "1", n, error, path=path, **{**more, "message": message if value is None else None})


@lru_cache(maxsize=2)  # a target and its draft; protocols of one variant come one after another
def model_of(checkpoint: Path, dtype: str) -> Any:
    import torch

    from assay.ops.models.checkpoint import load_model

    return load_model(checkpoint, dtype=getattr(torch, dtype), device=device())


@lru_cache(maxsize=2)
def tokenizer_of(checkpoint: Path) -> Any:
    from assay.ops.models.checkpoint import load_tokenizer

    return load_tokenizer(checkpoint)


@lru_cache(maxsize=2)
def runner_of(checkpoint: Path, dtype: str) -> Any:
    """The engine's decoder of a checkpoint, the fastest that this machine has."""
    import torch

    from assay.kernels.engine import open_runner

    return open_runner(checkpoint, dtype=getattr(torch, dtype), device=device())


def sampling_of(spec: SamplingSpec) -> Any:
    """The parameters of ``spec`` as decoding takes them."""
    from assay.ops.decode.sampling import Sampling

    return Sampling(**spec.model_dump())


def prompts_of(protocol: Any, tokenizer: Any, count: int, length: int, experiment_dir: Path | None) -> list[list[int]]:
    """Prompts of ``length`` tokens of the protocol's text; of the kind ``copy``, the last third is the beginning of the passage again."""
    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import prompts

    found = prompts(tokenizer, documents(**protocol.text.model_dump(), directory=experiment_dir), count, length).tolist()
    if protocol.prompt == "copy":
        found = [[*prompt[: length - length // 3], *prompt[: length // 3]] for prompt in found]
    return found


def eos_ids(checkpoint: Path) -> frozenset[int]:
    """All ids that end a text, by the generation config, or else by the config."""
    for name in ("generation_config.json", "config.json"):
        file = checkpoint / name
        config = json.loads(file.read_text()) if file.is_file() else {}
        eos = config.get("text_config", config).get("eos_token_id")
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def draft_of(subject: Subject, dtype: str) -> tuple[Any, Any]:
    """What drafts for ``subject``, and how many tokens a round it proposes: a number, or what adapts it.

    Raises:
        ValueError: the variant has no draft.
    """
    from assay.ops.decode.acceptance import Adaptive
    from assay.ops.decode.drafts import ModelDraft, NGramDraft

    if subject.draft is None:
        raise ValueError("this is measured of a variant with a draft; this one has none")
    draft = subject.draft
    gamma = draft.tokens if draft.adapt_cost is None else Adaptive(draft.adapt_cost, most=draft.tokens)
    if draft.method == "ngram":
        assert draft.ngram is not None
        return NGramDraft(draft.ngram), gamma
    assert draft.checkpoint is not None
    return ModelDraft(runner_of(draft.checkpoint, dtype), kv_format=draft.kv_format), gamma
