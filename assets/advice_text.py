"""An advice in words and tables: the ranking, and the decisions that follow from numbers. Not here: the numbers (``ops/cost``), or printing them (``cli.py``).

Units: GiB are 2^30 bytes, GB 10^9; times are of decoding; KL is in nats a token.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from assay.assets.advise import Advice, Candidate, in_four_bits
from assay.assets.devices import HERE_NAME, Machine
from assay.assets.footprints import Unknown
from assay.ops.cost.kv import crossover_context, kept, kv_bytes_at, largest_context, shared_bits
from assay.ops.cost.plan import Footprint, order
from assay.ops.cost.roofline import largest_batch, ridge, texts_in_memory
from assay.ops.cost.shape import Decoder
from assay.ops.cost.training import device_hours, teacher_share, training_flops

GIB = 2**30
USUAL_KL, HARMFUL_KL = 0.05, 0.1  # nats: the upper end for good 4-bit weights, and beyond which tasks suffer (published, 8B-class)
SNAPPED = 0.25  # of the tokens, that an eviction by the question keeps
RECOVERY_TOKENS, SCRATCH_TOKENS = (
    94e9,
    8e12,
)  # of distilling a pruned 8B, and of training its 15B parent (Muralidharan et al. 2024, arXiv:2407.14679)
UTILISATION = 0.4  # of the peak, in training
TREE = 60  # positions that a tree of drafts verifies at once
# How keys and values may be kept: bits a number all included, share of the tokens, and what that asks of the work.
KV_FORMATS = (
    ("bfloat16", 16, 1.0, "the reference"),
    ("fp8_e4m3", 8, 1.0, "first, whatever the work; its divergence is small enough to be measured and forgotten"),
    ("int4, groups of 32", shared_bits(4, group=32), 1.0, "keys per channel, values per token; test exact retrieval from 64 K on"),
    ("fp8_e4m3, a quarter kept", 8, SNAPPED, "only where the question is known when the text is read; not for agents, chains of thought or several hops"),
    ("int4, a quarter kept", shared_bits(4, group=32), SNAPPED, "both conditions at once"),
)  # fmt: skip
# What to look at before a 4-bit model is put to work: the metric, the suite that measures it, the better direction, and what it is for.
CHECKS = (
    ("kl_mean_nats", "divergence", -1, "the mean change of the next-token distribution"),
    ("kl_p99_nats", "divergence", -1, "the tokens that change most, which tasks hang on"),
    ("perplexity_delta", "divergence", -1, "an average over easy tokens: confirms that nothing broke, and no more"),
    ("task_score", "generation", 1, "several steps, each of which must be right"),
    ("pass_at_1", "arithmetic", 1, "the same with graded difficulty"),
    ("needle_accuracy", "needle", 1, "exact retrieval from long contexts"),
    ("accuracy", "choice", 1, "multiple choice, which notices least"),
    ("decode_tok_s", "speed", 1, "whether fewer bytes are less time here"),
)  # fmt: skip


class Told(NamedTuple):
    """A table under a title, and short sentences after it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    sentences: list[str]


def told(advice: Advice, *, top: int = 20) -> list[Told]:
    """The ``top`` of the ranking; what to do where keys and values do not fit; and the checks of the best variant in 4 bits."""
    parts = [ranking(advice, top=top)]
    if advice.too_large:
        smallest = min(advice.too_large, key=lambda each: each.prediction.memory_bytes if each.prediction else 0)
        if isinstance(smallest.footprint, Footprint):
            weights = [(smallest.name, smallest.footprint.size_bytes)]
            asked = advice.asked
            now = smallest.footprint.kv_bytes_per_token
            parts.append(kv_flow(weights, now, asked.memory_bytes, context=asked.context, batch=asked.batch))
    rounded = next((each for each in [*advice.ranked, *advice.too_far] if in_four_bits(each)), None)
    if rounded is not None:
        everything = [*advice.ranked, *advice.too_far, *advice.too_large, *advice.unknown]
        base = next((each for each in everything if not each.variant.steps), None)
        parts.append(launch_checks(rounded, base.facts if base else {}))
    return parts


def ranking(advice: Advice, *, top: int) -> Told:
    """The best candidates, the base, and the best of those left out, with predicted cost, divergence, and what is not known of each."""
    asked, machine, rows = advice.asked, advice.machine, []
    for place, each in enumerate(advice.ranked, start=1):
        if place <= top or not each.variant.steps:
            rows.append((str(place), *_row(each)))
    parts = (("too far", advice.too_far), ("too large", advice.too_large), ("unknown", advice.unknown))
    rows += [(word, *_row(each)) for word, group in parts for each in group[: max(1, top // 4)]]
    what = {"latency": "the time between two tokens", "throughput": "tokens a second of all texts", "memory": "bytes in memory"}[asked.goal]
    sentences = [
        f"Ranked by {what} at {asked.context:,} tokens of context and {'up to ' if asked.goal == 'throughput' else ''}{_texts(asked.batch)}, on {machine.name} ({machine.source}).",
        "A predicted time is the least that bytes and FLOPs allow; what is measured is longer.",
        f"{len(advice.ranked)} are ranked; too far {len(advice.too_far)}, too large {len(advice.too_large)}, cost unknown {len(advice.unknown)}.",
    ]
    if advice.residuals:
        longer = math.exp(statistics.median(advice.residuals))
        sentences.append(
            f"Here {len(advice.residuals)} timed decodes took {longer:.2f} times as long as predicted (median; the view roofline has each)."
        )
    if asked.at_most_kl is not None:
        unjudged = sum(each.kl is None for each in advice.ranked)
        sentences.append(
            f"Left out as too far: mean KL above {asked.at_most_kl:g} nats. {unjudged} of the ranked have no measured KL yet and may have to leave."
        )
    if advice.ranked:
        sentences += _of_the_best(advice)
    sentences += _why_unknown(advice)
    missing = {
        suite: sum(suite in each.missing for each in [*advice.ranked, *advice.unknown])
        for suite in ("bytes", "divergence", "acceptance", "speed")
    }
    lacking = ", ".join(f"{suite} of {count}" for suite, count in missing.items() if count)
    sentences.append(
        f"Not measured yet: {lacking}. --write FILE.yaml writes the experiment that measures it."
        if lacking
        else "Everything ranked has been measured."
    )
    columns = (
        "place",
        "variant",
        "bytes",
        "GiB",
        "ms/forward",
        "ms/token",
        "tok/s",
        "texts",
        "limited by",
        "mean KL",
        "measured tok/s",
        "missing",
    )
    return Told(f"{asked.base} for {asked.goal}", columns, rows, sentences)


def _why_unknown(advice: Advice) -> list[str]:
    names: dict[str, list[str]] = {}
    for each in advice.unknown:
        why = each.footprint.why if isinstance(each.footprint, Unknown) else "the acceptance of its draft is not measured"
        names.setdefault(why, []).append(each.name)
    return [
        f"Not ranked, since {why}: {', '.join(known[:4])}{f' and {len(known) - 4} more' if len(known) > 4 else ''}."
        for why, known in names.items()
    ]


def _row(each: Candidate) -> tuple[str, ...]:
    found = each.prediction
    numbers = ("", "", "", "", "", "")
    if found is not None:
        numbers = (
            f"{found.memory_bytes / GIB:.4g}", f"{1e3 * found.forward_seconds:.4g}", _number(found.seconds_per_token, 1e3, ".4g"),
            _number(found.tokens_per_second, 1, ".5g"), str(found.batch), found.limit,
        )  # fmt: skip
    return (
        each.name,
        each.how,
        *numbers,
        _number(each.kl, 1, ".4f"),
        _number(each.facts.get("decode_tok_s"), 1, ".1f"),
        ", ".join(each.missing),
    )


def _of_the_best(advice: Advice) -> list[str]:
    best, base = advice.ranked[0], next((each for each in [*advice.ranked, *advice.too_large] if not each.variant.steps), None)
    goal, found = advice.asked.goal, best.prediction
    assert found is not None and isinstance(best.footprint, Footprint)
    sentences = []
    if base is not None and base.prediction is not None and base is not best:
        of_base, of_best = order(base.prediction, goal), order(found, goal)
        ratio = of_best / of_base if goal == "throughput" else of_base / of_best
        unit = {"latency": "faster a token", "throughput": "more tokens a second", "memory": "less memory"}[goal]
        by = (
            f"to be {ratio:.2f} times better than the base ({unit})"
            if ratio > 1.005
            else f"not to be better than the base ({unit}: {ratio:.2f} times)"
        )
        sentences.append(f"{best.name} is predicted {by}.")
    sentences.append(f"Its forward is limited by {found.limit}.")
    crossing = crossover_context(best.footprint.step_weight_bytes, best.footprint.kv_bytes_per_token, batch=found.batch)
    sentences.append(
        f"With {_texts(found.batch)} it reads as much KV as weights from {crossing:,.0f} tokens of context on: "
        + (
            "a smaller KV format brings more than smaller weights."
            if crossing < advice.asked.context
            else "below that, smaller weights bring more."
        )
    )
    return sentences


def kv_flow(weights: Sequence[tuple[str, float]], kv_bytes_per_token: float, memory: float, *, context: int, batch: int) -> Told:
    """What fits where keys and values are the matter: for each way to keep them the longest context and the largest batch, for each size of the weights.

    Args:
        weights: name and bytes.
        kv_bytes_per_token: in bfloat16.
    """
    rows = []
    for name, bits, share, when in KV_FORMATS:
        token = kept(kv_bytes_per_token * float(bits) / 16, share)
        fits = []
        for _, size in weights:
            longest = largest_context(memory, weight_bytes=size, kv_bytes_per_token=token, batch=batch)
            fits.append(f"{longest:,} / {texts_in_memory(memory, weight_bytes=size, kv_bytes_per_token=token, context=context):,}")
        rows.append((name, f"{token / 1024:.1f}", f"{token * context / GIB:.2f}", *fits, when))
    need = kv_bytes_per_token * context * batch
    sentences = [
        f"{_texts(batch)} of {context:,} tokens: {need / GIB:.2f} GiB of bfloat16 keys and values; the memory is {memory / GIB:.1f} GiB."
    ]
    for name, size in weights:
        left = memory - size
        verdict = (
            "they fit" if need <= left else f"{(need - max(left, 0)) / GIB:.2f} GiB too many" if left > 0 else "not even the weights fit"
        )
        sentences.append(f"With {name} ({size / GIB:.2f} GiB): {verdict}; KV outweighs the weights from {crossover_context(size, kv_bytes_per_token, batch=batch):,.0f} tokens a text on.")  # fmt: skip
    sentences.append("Evictions drop what seemed unimportant when it was read: needles and second hops are lost before summaries show it.")
    columns = (
        "keys and values",
        "KiB/token",
        f"GiB at {context:,}",
        *(f"longest context / most texts, {name}" for name, _ in weights),
        "when",
    )
    return Told("Keys and values", columns, rows, sentences)


def launch_checks(candidate: Candidate, base: dict[str, float]) -> Told:
    """What to look at before a model with 4-bit weights is put to work, with the numbers that there are."""
    rows, lacking = [], []
    for metric, suite, better, why in CHECKS:
        value, of_base = candidate.facts.get(metric), base.get(metric)
        if value is None:
            lacking.append(suite)
        rows.append((metric, suite, _number(value, 1, ".4g"), _number(of_base, 1, ".4g"), _verdict(metric, value, of_base, better), why))
    kl = candidate.kl
    sentences = [
        f"{candidate.name}: good 4-bit weights have a mean KL of 0.01 to {USUAL_KL:g} nats; above {HARMFUL_KL:g} tasks suffer (8B-class, published)."
    ]
    if kl is None:
        sentences.append("Its divergence is not measured: that comes first, needs no benchmark, and works on the text that it will serve.")
    elif kl > HARMFUL_KL:
        sentences.append(
            f"At {kl:.4f} it is not ready: search the range, order GPTQ by activation, keep sensitive layers in 8 bits, or go back to 8 bits."
        )
    elif kl > USUAL_KL:
        sentences.append(f"At {kl:.4f} it is above the usual range: only the tasks can say whether that matters.")
    else:
        sentences.append(
            f"At {kl:.4f} it is in the usual range: confirm on generation and long contexts, which fall before multiple choice does."
        )
    if lacking:
        sentences.append(
            f"To measure: {', '.join(dict.fromkeys(lacking))}; each for the base as well, in the same engine and with the same sampling."
        )
    sentences.append(
        "A difference of one or two points of one sampled run is within its noise: draw at least four and compare pair by pair."
    )
    return Told("Before a 4-bit model is put to work", ("metric", "suite", "here", "base", "verdict", "what it shows"), rows, sentences)


def _verdict(metric: str, value: float | None, base: float | None, better: int) -> str:
    if value is None:
        return "not measured"
    if metric == "kl_mean_nats":
        return "usual" if value <= USUAL_KL else "above the usual" if value <= HARMFUL_KL else "tasks will suffer"
    if base is None or metric == "kl_p99_nats":
        return ""
    return "as good or better" if better * (value - base) >= 0 else f"worse by {abs(value - base):.4g}"


def shape_told(name: str, shape: Decoder, machine: Machine, memory: float, *, context: int, batch: int) -> list[Told]:
    """The same for a model that is known by its widths alone: its weights in three formats, and its keys and values beside them."""
    from assay.ops.quantize.grid import Format, effective_bits

    outside = shape.parameters - shape.block_parameters
    four = effective_bits(Format("int", 4, 128, symmetric=False), shape.hidden, shape.hidden)
    formats = (("bfloat16", 2.0 * shape.parameters, "bfloat16", 2.0), ("fp8_e4m3", 1.0 * shape.parameters, "fp8_e4m3", 1.0),
               ("int4, groups of 128", shape.block_parameters * four / 8 + 2.0 * outside, "bfloat16", four / 8))  # fmt: skip
    rows = []
    for format, size, dtype, each in formats:
        used, rate = machine.rate(dtype)
        width = machine.bandwidth(size)
        knee = ridge(rate, width)
        read = size - (0 if shape.tied else shape.head_parameters * (1.0 if format == "fp8_e4m3" else 2.0))
        rows.append((format, f"{size / 1e9:.1f}", f"{1e3 * read / width:.2f}", used, f"{knee:.0f}", str(largest_batch(knee, bytes_per_weight=each)),
                     str(largest_batch(knee, nodes=TREE, bytes_per_weight=each))))  # fmt: skip
    sentences = [
        f"{name}: {shape.parameters / 1e9:.2f} billion weights; on {machine.name} ({machine.source}).",
        f"Beyond the batch a forward waits for arithmetic: weights in fewer bits bring no more there, and a tree of {TREE} drafts is past it {TREE} times as soon.",
        "So speculation and 4-bit weights spend the same slack: both serve latency at small batches, and their gains do not multiply.",
    ]
    columns = ("weights", "GB", "ms to read", "products in", "ridge FLOP/B", "largest batch", f"with trees of {TREE}")
    token = kv_bytes_at(shape.layers, shape.kv_heads, shape.head_dim)
    sizes = [(format, size) for format, size, *_ in formats]
    return [Told(f"Weights of {name}", columns, rows, sentences), kv_flow(sizes, token, memory, context=context, batch=batch)]


def shrink_flow(teacher_name: str, teacher: Decoder, student_name: str, student: Decoder, machine: Machine) -> Told:
    """From a large model to a smaller one: what each way of getting there costs."""
    _, rate = machine.rate("bfloat16")
    share = teacher_share(teacher.parameters, student.parameters)
    recovered = training_flops(student.parameters, RECOVERY_TOKENS)
    ways = (
        ("the student's training, recovery", RECOVERY_TOKENS, recovered), ("the teacher's forward beside it", RECOVERY_TOKENS, share * recovered),
        ("both: prune and distil", RECOVERY_TOKENS, (1 + share) * recovered), ("the student from scratch", SCRATCH_TOKENS, training_flops(student.parameters, SCRATCH_TOKENS)),
    )  # fmt: skip
    rows = [
        (way, f"{tokens / 1e9:,.0f}", f"{flops:.2e}", f"{device_hours(flops, rate=rate, utilisation=UTILISATION):,.0f}")
        for way, tokens, flops in ways
    ]
    saved = training_flops(student.parameters, SCRATCH_TOKENS) / ((1 + share) * recovered)
    sentences = [
        f"{teacher_name} to {student_name}: {student.parameters / 1e9:.2f} of {teacher.parameters / 1e9:.2f} billion weights are left, one in {teacher.parameters / student.parameters:.1f}.",
        f"The teacher's forward is {share:.2f} times the student's training, so distilling costs {1 + share:.2f} times as much as training on the same tokens.",
        f"Against training from scratch it takes {SCRATCH_TOKENS / RECOVERY_TOKENS:.0f} times fewer tokens and {saved:.0f} times less arithmetic; the large model is there already and is not counted.",
        f"Hours are of one {machine.name} at {100 * UTILISATION:.0f} % of its peak.",
        "If only the cost of running matters, do not prune: 8-bit weights and keys and values first, then a draft for latency, or 4 bits for one small card.",
        "Otherwise in this order: cut widths for quality (depth too where latency matters), distil, train for instructions again, round last and measure again, "
        "for a pruned model loses more to rounding.",
        "Judge it by generated reasoning and instructions, which come back last, and not by multiple choice.",
    ]  # fmt: skip
    return Told(f"{teacher_name} to {student_name}", ("way", "10^9 tokens", "FLOPs", f"hours of {machine.name}"), rows, sentences)


def constants_told(machine: Machine) -> list[str]:
    """What the measured constants come to."""
    return [
        f"{dtype}: ridge {ridge(rate, machine.bandwidth(2.0**28)):.1f} FLOP/byte at {HERE_NAME}'s bandwidth for 256 MiB"
        for dtype, rate in sorted(machine.rates.items())
    ]


def _texts(count: int) -> str:
    return "1 text" if count == 1 else f"{count:,} texts"


def _number(value: float | None, factor: float, format: str) -> str:
    return "" if value is None else f"{value * factor:{format}}"
