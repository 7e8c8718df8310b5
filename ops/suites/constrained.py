"""The suite ``constrained``: what a mask on the next token makes of a model's answers. Not here: the distances (``ops/evaluate/constrained.py``),
the languages (``ops/decode/constraints.py``)."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.ops.suites.subject import Result, Subject, eos_ids, metric, runner_of, tokenizer_of
from assay.schemas.protocols import Constrained

if TYPE_CHECKING:
    from torch import Tensor

    from assay.ops.data.questions import Question
    from assay.ops.decode.constraints import Constraint
    from assay.ops.evaluate.constrained import Distances, Outcomes

ROWS = 16  # texts in one forward
FEWEST = 4  # effective draws below which what rests on Z is noisy: one draw in several carries it
DISTANCES = ("constrained_tv", "constrained_kl_nats", "constrained_reverse_kl_nats", "log_legal_mass_nats", "effective_sample_share")
UNITS: dict[str, str] = dict.fromkeys(("constrained_kl_nats", "constrained_reverse_kl_nats", "log_legal_mass_nats"), "nats")


def constrained(protocol: Constrained, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Compare, for each prompt, masked sampling with the model's own distribution over the legal answers, and greedy answers with and without a mask.

    An answer is a sequence of tokens with its end token, so every cut of a legal text into tokens counts. A prompt whose answers did not all end within
    ``max_new_tokens`` has no numbers but how many did not. Where few draws carry the weight of a prompt, distances are ``noisy``. A draft changes no
    distribution and is not used.

    Raises:
        DeadEnd: a language is empty; before any weight is read.
        ValueError: a pattern or schema that cannot be followed, a prompt without tokens, no chat template where one is asked for.
    """
    from assay.ops.data.questions import QUESTIONS, Question
    from assay.ops.evaluate.constrained import language

    questions = [Question(**each.model_dump()) for each in protocol.prompts] or list(QUESTIONS)
    tokenizer = tokenizer_of(subject.checkpoint)
    head_size, eos = _head(subject.checkpoint, tokenizer)
    prompts, constraints = [], []
    for index, question in enumerate(questions):
        try:
            constraints.append(_constraint(tokenizer, question, head_size, eos))
            prompts.append(_prompt(tokenizer, question.prompt, protocol.template, head_size))
        except ValueError as error:
            error.add_note(f"in prompt {index}, {question.prompt[:80]!r}")
            raise
    languages = [language(each, max_tokens=protocol.max_new_tokens, limit=protocol.exact_prefixes) for each in constraints]
    runner = runner_of(subject.checkpoint, protocol.dtype)
    found: list[dict[str, float | None]] = []
    told = []
    for index, (question, prompt, constraint, whole) in enumerate(zip(questions, prompts, constraints, languages, strict=True)):
        asked = continuations(runner, prompt, longest=protocol.max_new_tokens, kv_format=subject.kv_format)
        outcomes = _outcomes(protocol, constraint, whole, asked, vocabulary=len(tokenizer), seed=protocol.seed + index * protocol.samples)
        answers = _greedy(constraint, asked, eos, protocol.max_new_tokens, len(tokenizer))
        said = {name: None if answer is None else _decode(tokenizer, answer, eos) for name, answer in answers.items()}
        found.append(_numbers(question, outcomes, answers, said, lambda text: _decode(tokenizer, text, eos)))
        exact = outcomes.chance is not None
        told.append(
            {"prompt": question.prompt, "exact": exact, "texts": len(outcomes.texts), "greedy": said, "expected": question.expected}
        )
    return _result(found, told, runner.path)


def continuations(
    runner: Any, prompt: Sequence[int], *, longest: int, kv_format: str | None
) -> "Callable[[Sequence[Sequence[int]]], Tensor]":
    """The logits [texts, vocab] (float32, CPU) of what comes after ``prompt`` and each text of at most ``longest`` tokens; the prompt is read once."""
    import torch

    from assay.ops.decode.session import Session

    session = Session(runner, rows=ROWS, capacity=len(prompt) + longest, kv_format=kv_format)
    first = session.read([prompt, *[[]] * (ROWS - 1)])[0][0].cpu()
    session.reorder([0] * ROWS)

    def next_logits(texts: Sequence[Sequence[int]]) -> "Tensor":
        rows = []
        for start in range(0, len(texts), ROWS):
            part = [*texts[start : start + ROWS], *[[]] * (ROWS - len(texts[start : start + ROWS]))]
            logits = session.read(part)
            session.rollback([len(text) for text in part])
            rows += [logits[row][0].cpu() if text else first for row, text in enumerate(texts[start : start + ROWS])]
        return torch.stack(rows)

    return next_logits


def _head(checkpoint: Path, tokenizer: Any) -> tuple[int, frozenset[int]]:
    """How many logits the model has, and the ids that end a text, without reading a weight."""
    config = json.loads((checkpoint / "config.json").read_text())
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return config.get("text_config", config)["vocab_size"], eos_ids(checkpoint) or frozenset(own)


def _constraint(tokenizer: Any, question: "Question", head_size: int, eos: frozenset[int]) -> "Constraint":
    from assay.ops.decode.constraints import from_json_schema, from_regex

    if question.regex is not None:
        return from_regex(tokenizer, question.regex, head_size=head_size, eos_ids=eos)
    assert question.json_schema is not None
    return from_json_schema(tokenizer, json.loads(question.json_schema), head_size=head_size, eos_ids=eos)


def _prompt(tokenizer: Any, prompt: str, template: str, head_size: int) -> list[int]:
    from assay.ops.decode.session import check_prompt

    if template == "plain":
        return check_prompt(tokenizer(prompt)["input_ids"], head_size)
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; use template: plain")
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    return check_prompt(tokenizer(text, add_special_tokens=False)["input_ids"], head_size)


def _outcomes(protocol: Constrained, constraint: "Constraint", whole: Any, asked: Any, *, vocabulary: int, seed: int) -> "Outcomes":
    from assay.ops.evaluate.constrained import draw_masked, enumerate_masked

    if whole is not None:
        return enumerate_masked(whole, asked, temperature=protocol.temperature, vocabulary=vocabulary)
    return draw_masked(
        constraint, asked, samples=protocol.samples, max_tokens=protocol.max_new_tokens, temperature=protocol.temperature,
        vocabulary=vocabulary, seed=seed,
    )  # fmt: skip


def _greedy(constraint: "Constraint", asked: Any, eos: frozenset[int], longest: int, vocabulary: int) -> dict[str, tuple[int, ...] | None]:
    """The greedy answers; None for one that ran into a dead end."""
    from assay.ops.decode.constraints import DeadEnd
    from assay.ops.evaluate.constrained import greedy

    settings = {"eos_ids": eos, "max_tokens": longest, "vocabulary": vocabulary}
    try:
        kept = greedy(constraint, asked, **settings)
    except DeadEnd:
        kept = None
    return {"free": greedy(None, asked, **settings), "constrained": kept}


def _decode(tokenizer: Any, text: Sequence[int], eos: frozenset[int]) -> str:
    return tokenizer.decode([token for token in text if token not in eos], skip_special_tokens=True)


def _numbers(
    question: "Question",
    outcomes: "Outcomes",
    answers: dict[str, tuple[int, ...] | None],
    said: dict[str, str | None],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, float | None]:
    """The metrics of one prompt; None where one has no value, and none for what was not asked."""
    import torch

    from assay.ops.evaluate.constrained import CUT, DEAD_END, END, distances, expectations, says

    cut = outcomes.share(CUT)
    found: dict[str, float | None] = {"dead_end_share": outcomes.share(DEAD_END), "unfinished_share": cut}
    found["greedy_agreement"] = float(answers["free"] == answers["constrained"])
    known: Distances | None = distances(outcomes) if not cut and END in outcomes.ended else None
    found |= {name: known[at].value if known else None for at, name in enumerate(DISTANCES)}
    if question.expected is not None:
        right = [ended == END and says(decode(text), question.expected) for text, ended in zip(outcomes.texts, outcomes.ended, strict=True)]
        sampled = expectations(outcomes, torch.tensor(right, dtype=torch.float64)) if known else (None, None)
        found |= {
            "free_accuracy": float(says(said["free"] or "", question.expected)),
            "constrained_accuracy": float(says(said["constrained"] or "", question.expected)),
            "masked_accuracy": sampled[0].value if sampled[0] else None,
            "conditional_accuracy": sampled[1].value if sampled[1] else None,
        }
    return found


def _result(found: list[dict[str, float | None]], told: list[dict[str, Any]], path: str) -> Result:
    """Means over prompts, with standard errors over prompts."""
    from assay.ops.evaluate.acceptance import ratio

    metrics = []
    carried = [
        (numbers["effective_sample_share"] or FEWEST) * each["texts"]
        for numbers, each in zip(found, told, strict=True)
        if not each["exact"]
    ]
    few = sum(draws < FEWEST for draws in carried)
    infinite = any(numbers["dead_end_share"] and not numbers["unfinished_share"] for numbers in found)
    for name in dict.fromkeys(name for numbers in found for name in numbers):
        asked = [numbers[name] for numbers in found if name in numbers]
        values = [value for value in asked if value is not None]
        value, error = ratio([(each, 1.0) for each in values])
        more: dict[str, Any] = {"path": path}
        if name == "constrained_kl_nats" and infinite:
            value, error, more["message"] = None, None, "a draw ran into a dead end, so this is infinite"
        elif len(values) < len(asked):
            more["message"] = (
                f"{len(asked) - len(values)} of {len(asked)} prompts have no value: not every answer ended within max_new_tokens"
            )
        if few and value is not None and name in (*DISTANCES, "conditional_accuracy"):
            more["status"] = "noisy"
            more["message"] = f"fewer than {FEWEST} draws carry the weight of {few} of {len(asked)} prompts; raise samples"
        metrics.append(metric(name, value, UNITS.get(name, "1"), len(values), error, **more))
    items = [{"item": index, "metric": name, "value": value} for index, numbers in enumerate(found) for name, value in numbers.items()]
    return Result(metrics, items, {}, {"prompts": told})
