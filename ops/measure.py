"""The only file that joins a protocol to its ops: one function a suite, which loads, measures, and names what came out.

Imports stand inside the functions, so that the code fingerprint of a suite is of what that suite uses. Not here: any arithmetic
(``ops/evaluate``, ``ops/cost``), or where results go.
"""

import builtins
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from assay.schemas.protocols import Acceptance, Bytes, Divergence, Protocol, Speed


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


def measure(protocol: Protocol, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Apply ``protocol`` to ``subject``.

    Args:
        reference: the directory that :func:`reference` filled for this protocol and base; only ``divergence`` needs it.
        experiment_dir: what a text's relative path is relative to.
    Raises:
        Whatever the suite raises: a suite that fails has no numbers, and the caller says so.
    """
    match protocol:
        case Divergence():
            return divergence(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Bytes():
            return bytes(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Acceptance():
            return acceptance(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case Speed():
            return speed(protocol, subject, reference=reference, experiment_dir=experiment_dir)
        case _:
            assert_never(protocol)


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
    model, tokenizer = _model(base_dir, protocol.dtype), _tokenizer(base_dir)
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
    if (found := vocabulary_digest(_tokenizer(subject.checkpoint))) != known["vocabulary"]:
        raise ValueError(
            f"the tokenizer of {subject.checkpoint} has other tokens than the base's (vocabulary {found[:12]}, expected "
            f"{known['vocabulary'][:12]}); distributions over different token lists cannot be compared"
        )
    stored = load_file(reference / "reference.safetensors")
    is_base = subject.checkpoint == subject.base and subject.kv_format is None
    size = protocol.batch if not is_base else protocol.batch // 2 or 2
    model = _model(subject.checkpoint, protocol.dtype)
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


def bytes(protocol: Bytes, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Bytes of the stored tensors, of the draft's, and of a token of context; exact, hence without standard error.

    A draft that is the very checkpoint it drafts for is stored once.
    """
    from assay.ops.cost.bytes import artifact_bytes, kv_bytes_per_token, kv_shape

    def kv(checkpoint: Path, kv_format: str | None) -> int:
        return kv_bytes_per_token(*kv_shape(json.loads((checkpoint / "config.json").read_text())), kv_format or protocol.kv_dtype)

    own = artifact_bytes(subject.checkpoint)
    draft_checkpoint, draft_kv = subject.draft[3:] if subject.draft else (None, None)
    shared = draft_checkpoint == subject.checkpoint
    draft_bytes = artifact_bytes(draft_checkpoint).size_bytes if draft_checkpoint and not shared else 0
    metrics = [
        metric("size_bytes", own.size_bytes + draft_bytes, "B", 1),
        metric("weight_bytes", own.size_bytes, "B", 1),
        metric("draft_bytes", draft_bytes, "B", 1),
        metric("kv_bytes_per_token", kv(subject.checkpoint, subject.kv_format), "B", 1),
        metric("bits_per_weight", own.bits_per_weight, "bit", own.weights),
    ]
    if own.quantized_bits_per_weight is not None:
        metrics.append(metric("quantized_bits_per_weight", own.quantized_bits_per_weight, "bit", own.quantized_weights))
    if draft_checkpoint:
        metrics.append(metric("draft_kv_bytes_per_token", kv(draft_checkpoint, draft_kv), "B", 1))
    return Result(metrics, [], {}, own._asdict())


def acceptance(protocol: Acceptance, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Speculate on each prompt, and compare with plain decoding where that is greedy.

    ``acceptance_rate`` is accepted over proposed tokens; at a position, accepted over those that were reached, all before them having been accepted.
    """
    import torch

    from assay.ops.decode.acceptance import acceptance_by_position
    from assay.ops.decode.difference import first_difference
    from assay.ops.decode.generate import generate
    from assay.ops.decode.speculate import speculative_generate
    from assay.ops.evaluate.acceptance import differing, ratio
    from assay.ops.models.checkpoint import weights_path

    draft, gamma = _draft(subject, protocol.dtype), subject.draft[1] if subject.draft else 0
    model, tokenizer = _model(subject.checkpoint, protocol.dtype), _tokenizer(subject.checkpoint)
    prompts = _prompts(protocol, tokenizer, protocol.prompts, protocol.prompt_tokens, experiment_dir)
    eos = _eos_ids(model)
    settings = {"max_new_tokens": protocol.new_tokens, "eos_ids": eos, "kv_format": subject.kv_format, "vocabulary": len(tokenizer)}
    spoken, mismatches, compared, parted = [], 0, 0, []
    for index, prompt in enumerate(prompts):
        random = torch.Generator(device=model.device).manual_seed(protocol.seed + index)
        spoken.append(
            speculative_generate(model, draft, prompt, gamma=gamma, temperature=protocol.temperature, generator=random, **settings)
        )
        if protocol.temperature == 0:
            plain, drafted = generate(model, prompt, **settings).tokens, spoken[-1].tokens
            where = first_difference(
                model, prompt, plain, drafted, block=gamma + 1, kv_format=subject.kv_format, vocabulary=settings["vocabulary"]
            )
            # After a near tie both texts are right and go on differently, so nothing behind it is compared.
            rounding = where is not None and where.near_tie
            mismatches += 0 if rounding else differing(plain, drafted)
            compared += where.position if where is not None and rounding else max(len(plain), len(drafted))
            parted += [where._asdict() | {"prompt": index, "near_tie": rounding}] if where else []
    path = weights_path(subject.checkpoint)
    rounds = [(len(each.tokens) - 1, each.rounds) for each in spoken]
    proposals = [(sum(each.accepted), sum(each.proposed)) for each in spoken]
    nothing = "no token was proposed"
    metrics = [
        _ratio_metric("acceptance_rate", ratio(proposals), sum(n for _, n in proposals), path, message=nothing),
        _ratio_metric("tokens_per_round", ratio(rounds), sum(n for _, n in rounds), path, message="there was no round"),
    ]
    by_position = [acceptance_by_position(each.proposed, each.accepted, gamma) for each in spoken]
    for position in range(gamma):
        parts = [(accepted, reached) for reached, accepted in (each[position] for each in by_position)]
        row = {"slice_kind": "position", "slice": str(position + 1), "message": "no proposal came so far"}
        metrics.append(_ratio_metric("acceptance_rate", ratio(parts), sum(n for _, n in parts), path, **row))
    notes: dict[str, Any] = {
        "prompts": len(prompts),
        "rounds": sum(n for _, n in rounds),
        "new_tokens": sum(len(each.tokens) for each in spoken),
    }
    if protocol.temperature == 0:
        metrics.append(metric("greedy_mismatches", mismatches, "1", compared, path=path))
        finite = [{key: None if value == float("inf") else value for key, value in each.items()} for each in parted]
        notes |= {"near_ties": sum(each["near_tie"] for each in parted), "parted": finite}
    items = [
        {"item": index, "metric": name, "value": part / whole if whole else None}
        for name, parts in (("acceptance_rate", proposals), ("tokens_per_round", rounds))
        for index, (part, whole) in enumerate(parts)
    ]
    return Result(metrics, items, {}, notes)


def speed(protocol: Speed, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Prefill and decode rates, every variant in one loop; with a draft, decoding with and without it by turns. End-of-sequence tokens are ignored: the length is fixed.

    Raises:
        ValueError: a draft at a batch above 1, which speculation here does not do.
    """
    import torch

    from assay.ops.decode.generate import generate
    from assay.ops.decode.speculate import speculative_generate
    from assay.ops.evaluate.speed import batch_decode, decode_speeds, prefill_speed
    from assay.ops.evaluate.timing import peak_rss_bytes, reset_peak_rss
    from assay.ops.kv.cache import make_cache
    from assay.ops.models.checkpoint import weights_path

    if subject.draft and protocol.batch != 1:
        raise ValueError(f"speculation decodes one text at a time; got batch={protocol.batch} with a draft; use batch: 1")
    since_reset = reset_peak_rss()
    model, tokenizer = _model(subject.checkpoint, protocol.dtype), _tokenizer(subject.checkpoint)
    short, long = (
        torch.tensor(_prompts(protocol, tokenizer, protocol.batch, length, experiment_dir), device=model.device)
        for length in (protocol.prompt_tokens, protocol.prefill_tokens)
    )

    def cache() -> Any:
        return make_cache(model, subject.kv_format)

    settings = {"max_new_tokens": protocol.new_tokens, "kv_format": subject.kv_format, "vocabulary": len(tokenizer)}

    def plain() -> tuple[int, float]:
        if protocol.batch > 1:
            rows, seconds = batch_decode(model, short, new_tokens=protocol.new_tokens, cache=cache())
            return len(rows) * (protocol.new_tokens - 1), seconds
        done = generate(model, short, **settings)
        return len(done.tokens) - 1, done.decode_seconds

    runs = {"decode_tok_s": plain}
    if subject.draft is not None:
        draft, gamma = _draft(subject, protocol.dtype), subject.draft[1]

        def drafted() -> tuple[int, float]:
            done = speculative_generate(model, draft, short, gamma=gamma, **settings)
            return len(done.tokens) - 1, done.decode_seconds

        runs = {"decode_no_draft_tok_s": plain, "decode_tok_s": drafted}
    rates = {
        "prefill_tok_s": prefill_speed(model, long, make_cache=cache, repeats=protocol.repeats),
        **decode_speeds(runs, repeats=protocol.repeats),
    }
    threads, path = torch.get_num_threads(), weights_path(subject.checkpoint)
    metrics = [
        metric(name, rate.tok_s, "tok/s", len(rate.times.seconds), rate.standard_error, status=rate.times.status, threads=threads, path=path,
               other_cpu_share=rate.times.other_cpu_share)
        for name, rate in rates.items()
    ]  # fmt: skip
    metrics.append(metric("peak_rss_bytes", peak_rss_bytes(), "B", 1, threads=threads, path=path))
    notes = {"seconds": {name: list(rate.times.seconds) for name, rate in rates.items()}, "peak_rss_since_reset": since_reset}
    return Result(metrics, [], {}, notes)


def _ratio_metric(name: str, found: tuple[float | None, float | None], n: int, path: str, *, message: str, **more: Any) -> dict[str, Any]:
    value, error = found
    return metric(name, value, "1", n, error, path=path, **{**more, "message": message if value is None else None})


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@lru_cache(maxsize=2)  # a target and its draft; protocols of one variant come one after another
def _model(checkpoint: Path, dtype: str) -> Any:
    import torch

    from assay.ops.models.checkpoint import load_model

    return load_model(checkpoint, dtype=getattr(torch, dtype), device=_device())


@lru_cache(maxsize=2)
def _tokenizer(checkpoint: Path) -> Any:
    from assay.ops.models.checkpoint import load_tokenizer

    return load_tokenizer(checkpoint)


@lru_cache(maxsize=1)
def _base_head(base: Path, dtype: str) -> Any:
    """The base's head, without keeping the rest of it."""
    import torch

    from assay.ops.evaluate.divergence import head_of
    from assay.ops.models.checkpoint import load_model

    head = head_of(load_model(base, dtype=getattr(torch, dtype), device=_device()))
    return head._replace(weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())


def _draft(subject: Subject, dtype: str) -> Any:
    from assay.ops.decode.drafts import ModelDraft, NGramDraft

    if subject.draft is None:
        raise ValueError("acceptance is measured of a variant with a draft; this one has none")
    method, _, ngram, checkpoint, kv_format = subject.draft
    if method == "ngram":
        assert ngram is not None
        return NGramDraft(ngram)
    assert checkpoint is not None
    return ModelDraft(_model(checkpoint, dtype), kv_format=kv_format)


def _prompts(protocol: Acceptance | Speed, tokenizer: Any, count: int, length: int, experiment_dir: Path | None) -> list[list[int]]:
    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import prompts

    return prompts(tokenizer, documents(**protocol.text.model_dump(), directory=experiment_dir), count, length).tolist()


def _eos_ids(model: Any) -> frozenset[int]:
    """All ids that end a text, by the generation config."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or ())
