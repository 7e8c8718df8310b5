"""The suite ``needle``: whether codes that stand in a long text are found again. Not here: how a prompt is put together (``ops/tasks/needle.py``)."""

from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from assay.ops.suites.subject import Result, Subject, eos_ids, mean_metric, runner_of, sampling_of, tokenizer_of
from assay.schemas.sampling import SamplingSpec
from assay.schemas.tasks import Needle

SHOWN = 24


class Cell(NamedTuple):
    """Prompts of one kind, length (tokens at most) and depth (percent of the haystack)."""

    kind: str
    length: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.length}/{self.depth}"


def needle(protocol: Needle, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Ask for a code in prompts of each kind, length and depth, greedily; right is what has the code as its first number.

    ``needle_truncated_share`` counts answers that ended, for want of tokens, before they had a whole number. Prompts of one length are read side by side.
    A draft does not change what greedy decoding says and is not used.

    Raises:
        ValueError: a length is beyond the model's positions, or has no room for needles and question; there is no chat template; before anything is run.
    """
    from assay.ops.data.arithmetic import first_number
    from assay.ops.data.texts import documents
    from assay.ops.evaluate.plots_needle import needle_png
    from assay.ops.tasks.generated_answers import draw_answers, require_positions
    from assay.ops.tasks.needle import ask, build, encode, frame, haystack

    longest = max(protocol.lengths)
    require_positions(subject.checkpoint, longest + protocol.max_new_tokens, f"a prompt of length {longest}")
    tokenizer = tokenizer_of(subject.checkpoint)
    around = frame(tokenizer, chat=protocol.chat)
    texts = (document.text for document in documents(**protocol.haystack.model_dump(), directory=experiment_dir))
    sentences = haystack(tokenizer, texts, 4 * longest)
    cells = [Cell(*each) for each in product(protocol.kinds, protocol.lengths, protocol.depths_pct)]
    prompts: dict[Cell, list[Any]] = {cell: [] for cell in cells}
    for cell, number in product(cells, range(protocol.prompts)):
        random = Random(f"{protocol.order}/{cell.name}/{number}")
        asked = ask(cell.kind, keys=protocol.keys, random=random)
        built = build(
            asked, sentences, around, length=cell.length, depth_pct=cell.depth, random=random, encoded=lambda text: encode(tokenizer, text)
        )
        prompts[cell].append(built)
    runner, eos = runner_of(subject.checkpoint, protocol.dtype), eos_ids(subject.checkpoint) | frozenset(tokenizer.all_special_ids)
    right: dict[Cell, list[float]] = {}
    cut: dict[Cell, list[float]] = {}
    examples = []
    for length in protocol.lengths:
        of_length = [(cell, prompt) for cell in cells if cell.length == length for prompt in prompts[cell]]
        said = draw_answers(
            runner, tokenizer, [prompt.ids for _, prompt in of_length], sampling=sampling_of(SamplingSpec()), max_new_tokens=protocol.max_new_tokens,
            stops=["\n"], eos_ids=eos, kv_format=subject.kv_format, rows=protocol.batch,
        )  # fmt: skip
        for (cell, prompt), (answer,) in zip(of_length, said, strict=True):
            found = first_number(answer.text, cut=answer.cut)
            right.setdefault(cell, []).append(float(found == prompt.answer))
            cut.setdefault(cell, []).append(float(answer.cut and found is None))
            if len(right[cell]) == 1:
                examples.append(
                    {"cell": cell.name, "tokens": len(prompt.ids), "offset": prompt.offset, "answer": prompt.answer, "said": answer.text}
                )
    every = [right[cell][number] for cell in cells for number in range(protocol.prompts)]
    cuts = [each for cell in cells for each in cut[cell]]
    metrics = [
        mean_metric("needle_accuracy", every, path=runner.path),
        mean_metric("needle_truncated_share", cuts, path=runner.path),
        *(mean_metric("needle_accuracy", right[cell], slice_kind="needle", slice=cell.name, path=runner.path) for cell in cells),
    ]
    items = [{"item": number, "metric": "needle_accuracy", "value": value} for number, value in enumerate(every)]
    first = prompts[cells[0]][0]
    notes = {
        "first_ids": first.ids[:8],
        "first_prompt": tokenizer.decode(first.ids)[-400:],
        "tokens": {cell.name: fmean(len(prompt.ids) for prompt in prompts[cell]) for cell in cells},
        "depth_pct": {cell.name: fmean(100 * prompt.share for prompt in prompts[cell]) for cell in cells},
        "examples": examples[:SHOWN],
    }
    picture = needle_png({(cell.kind, cell.length, cell.depth): fmean(right[cell]) for cell in cells}, title=f"codes found again, {protocol.prompts} prompts a field")  # fmt: skip
    return Result(metrics, items, {"needle": picture}, notes)
