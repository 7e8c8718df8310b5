"""The step ``pretrain``: a small model from nothing, with a base's tokenizer. Not here: any arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.ops.steps.training import Running, settings_of, texts_of, told_of, with_curve
from assay.schemas.training import Pretrain

if TYPE_CHECKING:
    from assay.ops.steps.training import Windows


def pretrain(
    step: Pretrain,
    parent: Path,
    out: Path,
    *,
    windows: "Windows",
    running: Running = Running(),  # noqa: B008
) -> dict[str, Any]:
    """Make a random Llama of the shape that was asked for, train it on the next token of the text, and write it in the dtype of ``parent``.

    Args:
        parent: whose tokenizer it has; its weights are not read.
        windows: (text, windows, length) → token ids [windows, length].
    Returns:
        The shape, the number of weights, and the curve.
    """
    from assay.ops.models import checkpoint, dense
    from assay.ops.models.device import device, fast_in_bfloat16
    from assay.ops.steps.whole import written
    from assay.ops.train.scratch import Shape, ffn_for, learn, make, parameters

    where, tokenizer = device(), checkpoint.load_tokenizer(parent)
    bf16 = fast_in_bfloat16(where)
    said = dense.read_config(parent)
    vocabulary = said.get("text_config", said)["vocab_size"]
    shape = Shape(step.layers, step.hidden, step.ffn or 8, step.heads, step.kv_heads, vocabulary, step.tied)
    if step.parameters is not None:
        shape = ffn_for(shape, step.parameters, divisor=8)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = dense.move(make(shape, seed=running.seed, length=max(2048, step.length), special=special), device=where)
    read, held_out = texts_of(step, windows)
    points = learn(
        model, read, held_out, settings=settings_of(step, running.seed), rows=step.batch, bf16=bf16, vocabulary=len(tokenizer),
        **running.followed,
    )  # fmt: skip
    written(dense.move(model, dense.stored_dtype(parent), "cpu"), parent, out)
    return with_curve(out, {"shape": shape._asdict(), "parameters": parameters(shape), **told_of(step, points, held_out, bf16=bf16)})
