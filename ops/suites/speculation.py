"""The suite ``speculation``: what a draft's speed-up is made of. Not here: how times are taken (``ops/evaluate/timing.py``), or closed forms
(``ops/decode/acceptance.py``)."""

import statistics
from operator import attrgetter
from pathlib import Path
from typing import Any

from assay.ops.suites.subject import Result, Subject, draft_of, metric, prompts_of, runner_of, sampling_of, tokenizer_of
from assay.schemas.protocols import Speculation

MOST_GAMMA = 16  # the largest number of proposals that the best one is sought among


def speculation(protocol: Speculation, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Plain and speculative decoding by turns, at each batch; texts do not end before their length is reached.

    With t the time of a step of plain decoding at the same batch: ``draft_cost_ratio`` c is the time of one draft step over t, sampling included;
    ``verify_cost_ratio`` v the time of all the rest of a round over t. The published formula, E / (γ c + 1), takes v to be 1 and gives
    ``predicted_speedup``; with the measured v it is ``predicted_speedup_with_verification``, which should be near ``measured_speedup``. Cost, prediction
    and best γ are of the first batch. ``break_even_batch`` is the first batch that gains nothing.
    """
    import torch

    from assay.ops.decode.acceptance import acceptance_when_reached, best_gamma, expected_speedup, expected_tokens
    from assay.ops.decode.generate import generate
    from assay.ops.decode.speculate import speculative_generate
    from assay.ops.evaluate.speed import TimedDraft, emitted
    from assay.ops.evaluate.timing import interleave_times

    inner, gamma = draft_of(subject, protocol.dtype)
    draft: Any = TimedDraft(inner)
    runner, tokenizer = runner_of(subject.checkpoint, protocol.dtype), tokenizer_of(subject.checkpoint)
    settings: dict[str, Any] = {
        "max_new_tokens": protocol.new_tokens, "kv_format": subject.kv_format, "vocabulary": len(tokenizer), "sampling": sampling_of(protocol.sampling),
    }  # fmt: skip
    threads, metrics, gains, notes = torch.get_num_threads(), [], {}, {}
    for batch in protocol.batches:
        prompts = prompts_of(protocol, tokenizer, batch, protocol.prompt_tokens, experiment_dir)

        def generators(count: int = batch) -> list[torch.Generator]:
            return [torch.Generator(device=runner.device).manual_seed(protocol.seed + index) for index in range(count)]

        seen: dict[str, Any] = {"plain": [], "drafted": [], "draft_s": []}

        def plain(prompts: Any = prompts, seen: dict[str, Any] = seen, generators: Any = generators) -> float:
            done = generate(runner, prompts, generators=generators(), **settings)
            seen["plain"].append(emitted(done)[0] / len(done))
            return done[0].decode_seconds

        def drafted(prompts: Any = prompts, seen: dict[str, Any] = seen, generators: Any = generators) -> float:
            draft.reset()
            seen["drafted"] = speculative_generate(runner, draft, prompts, gamma=gamma, generators=generators(), **settings)
            seen["draft_s"].append(draft.seconds)
            return seen["drafted"][0].decode_seconds

        times = interleave_times({"plain": plain, "drafted": drafted}, repeats=protocol.repeats)
        spoken, step = seen["drafted"], times["plain"].median / seen["plain"][-1]
        shares = [times[name].other_cpu_share for name in times]
        status = "noisy" if any(times[name].status == "noisy" for name in times) else "ok"
        common = {
            "threads": threads,
            "path": runner.path,
            "status": status,
            "other_cpu_share": max((s for s in shares if s is not None), default=None),
        }
        # Every text emits as many tokens, so at a batch the time of a text is the time of all.
        gain = times["plain"].median / times["drafted"].median
        errors = [(times[name].spread or 0) / times[name].median for name in times]
        gains[batch] = gain
        sliced = {"slice_kind": "batch", "slice": str(batch)}
        metrics.append(
            metric("measured_speedup", gain, "1", protocol.repeats, gain * (errors[0] ** 2 + errors[1] ** 2) ** 0.5, **sliced, **common)
        )
        notes[f"batch_{batch}"] = {"seconds": {name: list(times[name].seconds) for name in times}, "step_seconds": step}
        if batch != protocol.batches[0]:
            continue
        metrics.append({**metrics[-1], "slice_kind": "all", "slice": "all"})
        proposed, taken = ([count for each in spoken for count in part(each)] for part in (attrgetter("proposed"), attrgetter("accepted")))
        alpha = acceptance_when_reached(proposed, taken)
        steps, rounds = max(sum(each.proposed) for each in spoken), max(each.rounds for each in spoken)
        spent = statistics.median(seen["draft_s"][1:])  # the first is the warm-up
        cost = spent / steps / step if steps else None
        verify = (times["drafted"].median - spent) / rounds / step
        metrics.append(metric("verify_cost_ratio", verify, "1", rounds, **common))
        if alpha is None or cost is None:
            metrics.append(metric("draft_cost_ratio", None, "1", 0, **{**common, "message": "no token was proposed"}))
            continue
        fixed = gamma if isinstance(gamma, int) else max(1, round(steps / rounds))
        best = best_gamma(alpha, cost, MOST_GAMMA)
        found = {
            "draft_cost_ratio": cost, "predicted_speedup": expected_speedup(alpha, fixed, cost),
            "predicted_speedup_with_verification": expected_tokens(alpha, fixed) / (fixed * cost + verify), "best_gamma": best,
            "speedup_at_best_gamma": expected_speedup(alpha, best, cost),
        }  # fmt: skip
        metrics += [metric(name, value, "1", steps, **common) for name, value in found.items()]
        notes |= {"alpha": alpha, "gamma": fixed}
    losing = [batch for batch, gain in gains.items() if gain <= 1]
    nothing = {} if losing else {"message": f"it still pays at {protocol.batches[-1]}, the largest batch"}
    metrics.append(
        metric("break_even_batch", losing[0] if losing else None, "1", len(gains), **{"path": runner.path, "threads": threads, **nothing})
    )
    return Result(metrics, [], {}, notes)
