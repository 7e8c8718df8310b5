"""The suite ``divergence``: KL(base‖variant) and what goes with it. Not here: its arithmetic (``ops/evaluate``)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.ops.models.device import device
from assay.ops.suites.subject import Result, Subject, metric, model_of, tokenizer_of
from assay.schemas.protocols import Divergence


def reference(protocol: Divergence, base_dir: Path, out: Path, *, experiment_dir: Path | None = None) -> dict[str, Any]:
    """Write the base's final hidden states on the protocol's text into ``out``, with all that a variant is compared by.

    ``reference.safetensors``: hidden [targets, hidden], logsumexp, entropy, nll, top and window [targets]; ids, classes and language [tokens].
    ``reference.json``: the windows, the BOS put before each, the languages, and the digest of the vocabulary.
    Returns:
        A summary: tokens, targets, windows, bos, first_ids (of the first window as it is run), base_perplexity, vocabulary.
    """
    import torch
    from safetensors.torch import save_file

    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import token_stream, vocabulary_digest
    from assay.ops.evaluate.divergence import check_head, final_hidden, head_of
    from assay.ops.evaluate.divergence import reference as statistics_of
    from assay.ops.evaluate.token_classes import pieces, token_classes
    from assay.ops.evaluate.windows import batches, bos_of, perplexity, windows

    assert protocol.stride is not None  # the spec fills it
    model, tokenizer = model_of(base_dir, protocol.dtype), tokenizer_of(base_dir)
    stream = token_stream(tokenizer, documents(**protocol.text.model_dump(), directory=experiment_dir), protocol.tokens)
    cover = windows(len(stream.ids), protocol.window, protocol.stride)
    bos, head = bos_of(tokenizer, protocol.bos), head_of(model)
    check_head(model, head, stream.ids.to(model.device))
    hidden = torch.empty(len(stream.ids) - 1, head.weight.shape[1])
    first_ids: list[int] = []
    for batch in batches(stream.ids, cover, batch=protocol.batch, bos=bos):
        first_ids = first_ids or batch.ids[0, :8].tolist()
        states = final_hidden(model, batch.ids.to(model.device), batch.mask.to(model.device))
        hidden[batch.at - 1] = states[batch.rows, batch.columns].float().cpu()
    statistics = statistics_of(hidden.to(model.device), head, stream.ids[1:])
    window = torch.cat([torch.full((window.stop - window.first,), index) for index, window in enumerate(cover)])
    tensors = {
        "hidden": hidden, **statistics._asdict(), "window": window, "ids": stream.ids, "language": stream.language,
        "classes": token_classes(stream.ids, pieces(tokenizer)),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "reference.safetensors")
    told = {
        "tokens": len(stream.ids), "targets": len(hidden), "windows": len(cover), "bos": bos, "first_ids": first_ids,
        "base_perplexity": perplexity(statistics.nll), "vocabulary": vocabulary_digest(tokenizer),
    }  # fmt: skip
    whole = {**told, "languages": stream.languages, "cover": cover, "head_rows": len(head.weight)}
    (out / "reference.json").write_text(json.dumps(whole, indent=1))
    return told


def divergence(protocol: Divergence, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """KL(base‖variant) and what goes with it, on the tokens, windows and base states of ``reference``.

    The base itself is run in another batch size than its reference, so that its KL is the engine's own noise. A draft changes no distribution
    and is not used.
    """
    import torch
    from safetensors.torch import load_file

    from assay.ops.data.tokens import vocabulary_digest
    from assay.ops.evaluate.divergence import BaseStatistics, PerToken, check_head, final_hidden, head_of, per_token
    from assay.ops.evaluate.plots import kl_histogram_png
    from assay.ops.evaluate.summarise import summarise
    from assay.ops.evaluate.windows import Window, batches
    from assay.ops.kv.cache import make_cache
    from assay.ops.models.checkpoint import weights_path

    if reference is None:
        raise ValueError("divergence compares with a reference of the base; got none; make one with ops.measure.reference")
    known = json.loads((reference / "reference.json").read_text())
    if (found := vocabulary_digest(tokenizer_of(subject.checkpoint))) != known["vocabulary"]:
        raise ValueError(
            f"the tokenizer of {subject.checkpoint} has other tokens than the base's (vocabulary {found[:12]}, expected "
            f"{known['vocabulary'][:12]}); distributions over different token lists cannot be compared"
        )
    stored = load_file(reference / "reference.safetensors")
    is_base = subject.checkpoint == subject.base and subject.kv_format is None
    size = protocol.batch if not is_base else protocol.batch // 2 or 2
    model = model_of(subject.checkpoint, protocol.dtype)
    head = head_of(model)
    base_head = head if subject.checkpoint == subject.base else _base_head(subject.base, protocol.dtype)
    ids = stored["ids"]
    check_head(model, head, ids.to(model.device))
    statistics = BaseStatistics(*(stored[name] for name in BaseStatistics._fields))
    targets = len(ids) - 1
    tokens = PerToken(*(torch.empty(targets, dtype=torch.bool if name == "agrees" else torch.float32) for name in PerToken._fields))
    for batch in batches(ids, [Window(*window) for window in known["cover"]], batch=size, bos=known["bos"]):
        cache = make_cache(model, subject.kv_format) if subject.kv_format else None
        states = final_hidden(model, batch.ids.to(model.device), batch.mask.to(model.device), cache)[batch.rows, batch.columns]
        at = batch.at - 1
        compared = per_token(
            stored["hidden"][at], base_head, states, head, batch.targets, base=BaseStatistics(*(part[at] for part in statistics))
        )
        for whole, part in zip(tokens, compared, strict=True):
            whole[at] = part
    languages = tuple(known["languages"])
    summary = summarise(
        tokens, stored["window"], classes=stored["classes"][1:], language=stored["language"][1:], languages=languages, is_base=is_base
    )
    path = weights_path(subject.checkpoint)
    metrics = [
        metric(**{"name" if key == "metric" else key: value for key, value in row._asdict().items()}, path=path) for row in summary.metrics
    ]
    values = {row["metric"]: row["value"] for row in metrics if row["slice_kind"] == "all"}
    edges, counts = summary.histogram
    marks = {label: values[name] for label, name in (("mean", "kl_mean_nats"), ("99 %", "kl_p99_nats")) if values[name] is not None}
    pictures = {"kl_histogram": kl_histogram_png(edges, counts, marks=marks)} if sum(counts) else {}
    notes = {
        "windows": len(known["cover"]), "targets": targets, "bos": known["bos"], "first_ids": known["first_ids"], "batch": size,
        "standard_error": "clustered by window", "histogram": {"edges_nats": edges, "tokens": counts},
        "entropy_mean_nats": float(tokens.base_entropy.double().mean()),
    }  # fmt: skip
    return Result(metrics, summary.items, pictures, notes)


@lru_cache(maxsize=1)
def _base_head(base: Path, dtype: str) -> Any:
    """The base's head, without keeping the rest of it."""
    import torch

    from assay.ops.evaluate.divergence import head_of
    from assay.ops.models.checkpoint import load_model

    head = head_of(load_model(base, dtype=getattr(torch, dtype), device=device()))
    return head._replace(weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())
