"""The suite ``arithmetic``: how often samples of generated problems are right, alone, any of k, and by vote, at each temperature.

Not here: the problems and how an answer is read (``ops/data/arithmetic.py``), drawing (``ops/decode/samples.py``), pass@k and votes themselves.
"""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from assay.ops.suites.subject import Result, Subject, eos_ids, mean_metric, metric, runner_of, sampling_of, tokenizer_of
from assay.schemas.protocols import Arithmetic

if TYPE_CHECKING:
    import torch


class Answers(NamedTuple):
    """What the samples of one problem say: how many are right, how many have each wrong answer, how many none, how many were cut off."""

    right: int
    wrong: list[int]
    silent: int
    cut: int

    @property
    def samples(self) -> int:
        return self.right + sum(self.wrong) + self.silent


def arithmetic(protocol: Arithmetic, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Ask each problem, draw its samples at every temperature, and judge them exactly; standard errors are over problems.

    A sample without a number, or whose number may have been cut off, is wrong and has no vote. The same number of a problem and a sample gives the same
    generator at every temperature, so that temperatures differ by what they do and not by luck. A draft changes no distribution and is not used.
    """
    import torch

    from assay.ops.data.arithmetic import first_number, problems, prompt, stop_ids
    from assay.ops.decode.samples import draw_samples

    drawn = problems(protocol.shots + protocol.problems, digits=protocol.digits, operations=protocol.operations, seed=protocol.seed)
    shots, asked = drawn[: protocol.shots], drawn[protocol.shots :]
    tokenizer = tokenizer_of(subject.checkpoint)
    stops = stop_ids(tokenizer) | eos_ids(subject.checkpoint)
    runner = runner_of(subject.checkpoint, protocol.dtype)

    def generator_of(problem: int, sample: int) -> "torch.Generator":
        return torch.Generator(device=runner.device).manual_seed(Random(f"{protocol.seed}/{problem}/{sample}").getrandbits(63))

    samplings = [sampling_of(protocol.sampling.model_copy(update={"temperature": each})) for each in protocol.temperatures]
    said = draw_samples(
        runner, [tokenizer(prompt(problem, shots))["input_ids"] for problem in asked],
        [(sampling, 1 if sampling.temperature == 0 else protocol.samples) for sampling in samplings],
        max_new_tokens=protocol.max_new_tokens, generator_of=generator_of, stop_ids=stops, kv_format=subject.kv_format, vocabulary=len(tokenizer),
    )  # fmt: skip
    found: list[list[Answers]] = [[] for _ in samplings]
    examples = []
    for problem, of_problem in zip(asked, said, strict=True):
        for way, samples in enumerate(of_problem):
            cut = [sample[-1] not in stops for sample in samples]
            texts = [tokenizer.decode(sample, skip_special_tokens=True) for sample in samples]
            found[way].append(judge([first_number(text, cut=one) for text, one in zip(texts, cut, strict=True)], problem.answer, sum(cut)))
            if not way:
                examples.append({"question": problem.question, "answer": problem.answer, "said": texts[0]})
    metrics = [row for way, answers in enumerate(found) for row in facts_at(answers, protocol.temperatures[way], protocol.ks, runner.path)]
    first = next(row for row in metrics if row["metric"] == "pass_at_1")
    items = [
        {"item": number, "metric": f"pass_at_1/{temperature:g}", "value": each.right / each.samples}
        for temperature, answers in zip(protocol.temperatures, found, strict=True)
        for number, each in enumerate(answers)
    ]
    notes = {
        "shots": [f"{each.question} {each.answer}" for each in shots],
        "examples": examples[:24],
        "temperature": protocol.temperatures[0],
    }
    return Result([{**first, "slice_kind": "all", "slice": "all"}, *metrics], items, {}, notes)


def judge(numbers: Sequence[Decimal | None], answer: int, cut: int) -> Answers:
    """Count what the samples of one problem say; ``cut`` of them did not end."""
    counts = Counter(number for number in numbers if number is not None)
    right = counts.pop(Decimal(answer), 0)
    return Answers(right, list(counts.values()), len(numbers) - right - counts.total(), cut)


def facts_at(answers: Sequence[Answers], temperature: float, ks: Sequence[int], path: str) -> list[dict[str, Any]]:
    """The facts of one temperature; of those k that it has samples for."""
    from assay.ops.decode.votes import majority_at_k
    from assay.ops.evaluate.pass_at_k import mean_pass_at_k

    def row(name: str, values: Sequence[float], unit: str = "1", kind: str = "temperature", part: str = "") -> dict[str, Any]:
        return mean_metric(name, values, unit, slice_kind=kind, slice=f"{temperature:g}{part}", path=path)

    rows = [
        row("pass_at_1", [each.right / each.samples for each in answers]),
        row("unparsed_share", [each.silent / each.samples for each in answers]),
        row("truncated_share", [each.cut / each.samples for each in answers]),
        row("distinct_answers", [len(each.wrong) + bool(each.right) for each in answers], "answer"),
    ]
    for k in (k for k in ks if k <= answers[0].samples):
        part: dict[str, Any] = {"slice_kind": "temperature_k", "slice": f"{temperature:g}/{k}", "path": path}
        found = mean_pass_at_k([(each.samples, each.right) for each in answers], k)
        rows.append(metric("pass_at_k", found.value, "1", found.problems, found.standard_error, **part))
        votes = [majority_at_k(each.right, each.wrong, k, silent=each.silent) for each in answers]
        rows.append(row("majority_at_k", votes, kind="temperature_k", part=f"/{k}"))
    return rows
