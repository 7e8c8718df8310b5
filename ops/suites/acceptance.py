"""The suite ``acceptance``: what a draft proposes and its target keeps. Not here: decoding (``ops/decode``)."""

from pathlib import Path
from typing import Any

from assay.ops.suites.subject import (
    Result,
    Subject,
    draft_of,
    eos_ids,
    metric,
    prompts_of,
    ratio_metric,
    runner_of,
    sampling_of,
    tokenizer_of,
)
from assay.schemas.protocols import Acceptance


def acceptance(protocol: Acceptance, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Speculate on all prompts side by side, and compare with plain decoding where that is greedy.

    ``acceptance_rate`` is accepted over proposed tokens; at a position, and as ``acceptance_when_reached``, accepted over those that were reached, all
    before them having been accepted. ``expected_acceptance`` is the mean of Σ min(p, q) over the same proposals: each acceptance is a draw with that
    chance, so ``acceptance_minus_expected`` is 0 within its standard error, √(Σ o(1 - o)) / n.
    """
    import torch

    from assay.ops.decode.acceptance import acceptance_by_position
    from assay.ops.decode.difference import first_difference
    from assay.ops.decode.generate import generate
    from assay.ops.decode.speculate import speculative_generate
    from assay.ops.evaluate.acceptance import differing, ratio

    draft, gamma = draft_of(subject, protocol.dtype)
    runner, tokenizer = runner_of(subject.checkpoint, protocol.dtype), tokenizer_of(subject.checkpoint)
    prompts = prompts_of(protocol, tokenizer, protocol.prompts, protocol.prompt_tokens, experiment_dir)
    settings: dict[str, Any] = {
        "max_new_tokens": protocol.new_tokens, "eos_ids": eos_ids(subject.checkpoint), "kv_format": subject.kv_format, "vocabulary": len(tokenizer),
        "sampling": sampling_of(protocol.sampling),
    }  # fmt: skip
    most = gamma if isinstance(gamma, int) else gamma.most
    generators = [torch.Generator(device=runner.device).manual_seed(protocol.seed + index) for index in range(len(prompts))]
    spoken = speculative_generate(runner, draft, prompts, gamma=gamma, generators=generators, **settings)
    mismatches, compared, parted = 0, 0, []
    for index, plain in enumerate(generate(runner, prompts, **settings) if protocol.sampling.greedy else []):
        one, other = plain.tokens, spoken[index].tokens
        where = first_difference(
            runner, prompts[index], one, other, block=most + 1, kv_format=subject.kv_format, vocabulary=settings["vocabulary"]
        )
        # After a near tie both texts are right and go on differently, so nothing behind it is compared.
        rounding = where is not None and where.near_tie
        mismatches += 0 if rounding else differing(one, other)
        compared += where.position if where is not None and rounding else max(len(one), len(other))
        parted += [where._asdict() | {"prompt": index, "near_tie": rounding}] if where else []
    path = runner.path
    rounds = [(len(each.tokens) - 1, each.rounds) for each in spoken]
    proposals = [(sum(each.accepted), sum(each.proposed)) for each in spoken]
    nothing = "no token was proposed"
    by_position = [acceptance_by_position(each.proposed, each.accepted, most) for each in spoken]
    tested = [(sum(taken for _, taken in rows), sum(reached for reached, _ in rows)) for rows in by_position]
    overlaps = [[chance for one in each.overlaps for chance in one] for each in spoken]
    expected = [(sum(chances), len(chances)) for chances in overlaps]
    metrics = [
        ratio_metric("acceptance_rate", ratio(proposals), sum(n for _, n in proposals), path, message=nothing),
        ratio_metric("tokens_per_round", ratio(rounds), sum(n for _, n in rounds), path, message="there was no round"),
        ratio_metric("acceptance_when_reached", ratio(tested), sum(n for _, n in tested), path, message=nothing),
        ratio_metric("expected_acceptance", ratio(expected), sum(n for _, n in expected), path, message=nothing),
        ratio_metric("acceptance_minus_expected", _surprise(tested, overlaps), sum(n for _, n in tested), path, message=nothing),
    ]
    for position in range(most):
        parts = [(accepted, reached) for reached, accepted in (each[position] for each in by_position)]
        row = {"slice_kind": "position", "slice": str(position + 1), "message": "no proposal came so far"}
        metrics.append(ratio_metric("acceptance_rate", ratio(parts), sum(n for _, n in parts), path, **row))
    notes: dict[str, Any] = {
        "prompts": len(prompts),
        "rounds": sum(n for _, n in rounds),
        "new_tokens": sum(len(each.tokens) for each in spoken),
        "sampling": protocol.sampling.model_dump(),
    }
    if protocol.sampling.greedy:
        metrics.append(metric("greedy_mismatches", mismatches, "1", compared, path=path))
        finite = [{key: None if value == float("inf") else value for key, value in each.items()} for each in parted]
        notes |= {"near_ties": sum(each["near_tie"] for each in parted), "parted": finite}
    items = [
        {"item": index, "metric": name, "value": part / whole if whole else None}
        for name, parts in (("acceptance_rate", proposals), ("tokens_per_round", rounds))
        for index, (part, whole) in enumerate(parts)
    ]
    return Result(metrics, items, {}, notes)


def _surprise(tested: list[tuple[int, int]], overlaps: list[list[float]]) -> tuple[float | None, float | None]:
    """Acceptances less their chances, a tested proposal, and the standard error that chance alone gives it."""
    chances = [chance for each in overlaps for chance in each]
    if not chances:
        return None, None
    taken = sum(accepted for accepted, _ in tested)
    return (taken - sum(chances)) / len(chances), sum(chance * (1 - chance) for chance in chances) ** 0.5 / len(chances)
