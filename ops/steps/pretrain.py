"""The step ``pretrain``: a small model from nothing, with a base's tokenizer. Not here: any arithmetic."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.ops.steps.training import CURVE, settings_of, steps_of, texts_of
from assay.schemas.training import Pretrain

if TYPE_CHECKING:
    from assay.ops.steps.training import Windows
    from assay.ops.train.loop import Progress


def pretrain(
    step: Pretrain,
    parent: Path,
    out: Path,
    *,
    windows: "Windows",
    seed: int = 0,
    state: Path | None = None,
    run: dict[str, Any] | None = None,
    progress: "Callable[[Progress], None] | None" = None,
) -> dict[str, Any]:
    """Make a random Llama of the shape that was asked for, train it on the next token of the text, and write it in the dtype of ``parent``.

    Args:
        parent: whose tokenizer it has; its weights are not read.
        windows: (text, windows, length) → token ids [windows, length].
        state, run, progress: see ``ops/train/loop.py``.
    Returns:
        The shape, the number of weights, and the curve.
    """
    import torch

    from assay.ops.models import checkpoint, dense
    from assay.ops.steps.whole import written
    from assay.ops.train.scratch import Shape, ffn_for, learn, make, parameters

    device, tokenizer = "cuda" if torch.cuda.is_available() else "cpu", checkpoint.load_tokenizer(parent)
    said = dense.read_config(parent)
    vocabulary = said.get("text_config", said)["vocab_size"]
    shape = Shape(step.layers, step.hidden, step.ffn or 8, step.heads, step.kv_heads, vocabulary, step.tied)
    if step.parameters is not None:
        shape = ffn_for(shape, step.parameters, divisor=8)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = dense.move(make(shape, seed=seed, length=max(2048, step.length), special=special), device=device)
    read, held_out = texts_of(step, windows)
    points = learn(
        model, read, held_out, settings=settings_of(step, seed), rows=step.batch, bf16=device == "cuda", vocabulary=len(tokenizer), state=state,
        run=run, progress=progress,
    )  # fmt: skip
    written(dense.move(model, dense.stored_dtype(parent), "cpu"), parent, out)
    told = {
        "shape": shape._asdict(), "parameters": parameters(shape), "steps": steps_of(step), "tokens": points[-1].tokens,
        "held_out_tokens": held_out.numel(), "curve": [point._asdict() for point in points],
    }  # fmt: skip
    (out / CURVE).write_text(json.dumps(told, allow_nan=False))
    return told
