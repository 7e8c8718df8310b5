"""How the suites that ask the harness's tasks open a variant as its model, and run its evaluation. Not here: which tasks, or what becomes of the scores."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.ops.suites.subject import Subject, draft_of, eos_ids, runner_of, tokenizer_of

if TYPE_CHECKING:
    from assay.ops.tasks.harness import EngineLM

USUAL_LENGTH = 2048  # of a model whose config states none, as the harness has it


def open_lm(subject: Subject, *, dtype: str, batch: int, seed: int = 0) -> "EngineLM":
    """A variant as a language model of the harness: its weights as they are stored, its KV format, and its draft where it has one."""
    from assay.ops.tasks.harness import Drafting, EngineLM

    return EngineLM(
        runner_of(subject.checkpoint, dtype), tokenizer_of(subject.checkpoint), max_length=longest(subject.checkpoint),
        eos_ids=eos_ids(subject.checkpoint), batch=batch, kv_format=subject.kv_format, seed=seed,
        drafting=Drafting(*draft_of(subject, dtype)) if subject.draft else None,
    )  # fmt: skip


def longest(checkpoint: Path) -> int:
    """How many tokens a model can have before it."""
    from assay.ops.models.dense import positions

    return positions(checkpoint) or USUAL_LENGTH


def evaluate(lm: "EngineLM", tasks: Mapping[str, Any], *, chat: bool, limit: int | None = None, unsafe: bool = False) -> dict[str, Any]:
    """The harness's results and samples of task objects, or of what its TaskManager loads; with ``chat``, shots are turns of the conversation."""
    from lm_eval.evaluator import evaluate as harness

    with quiet():
        found = harness(
            lm, dict(tasks), limit=limit, apply_chat_template=chat, fewshot_as_multiturn=chat, log_samples=True, confirm_run_unsafe_code=unsafe,
            bootstrap_iters=1000,
        )  # fmt: skip
    assert found is not None
    return dict(found)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the harness's advice to its own users and its progress bars; its errors are heard."""
    from unittest.mock import patch

    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with patch("lm_eval.api.task.tqdm", lambda items, **_: items):
            yield
    finally:
        logger.setLevel(before)
