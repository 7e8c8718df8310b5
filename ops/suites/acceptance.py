"""The suite ``acceptance``: what a draft proposes and its target keeps. Not here: decoding (``ops/decode``)."""

from pathlib import Path
from typing import Any

from assay.ops.suites.subject import Result, Subject, draft_of, eos_ids, metric, model_of, prompts_of, ratio_metric, tokenizer_of
from assay.schemas.protocols import Acceptance


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

    draft, gamma = draft_of(subject, protocol.dtype), subject.draft[1] if subject.draft else 0
    model, tokenizer = model_of(subject.checkpoint, protocol.dtype), tokenizer_of(subject.checkpoint)
    prompts = prompts_of(protocol, tokenizer, protocol.prompts, protocol.prompt_tokens, experiment_dir)
    eos = eos_ids(model)
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
        ratio_metric("acceptance_rate", ratio(proposals), sum(n for _, n in proposals), path, message=nothing),
        ratio_metric("tokens_per_round", ratio(rounds), sum(n for _, n in rounds), path, message="there was no round"),
    ]
    by_position = [acceptance_by_position(each.proposed, each.accepted, gamma) for each in spoken]
    for position in range(gamma):
        parts = [(accepted, reached) for reached, accepted in (each[position] for each in by_position)]
        row = {"slice_kind": "position", "slice": str(position + 1), "message": "no proposal came so far"}
        metrics.append(ratio_metric("acceptance_rate", ratio(parts), sum(n for _, n in parts), path, **row))
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
