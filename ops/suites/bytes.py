"""The suite ``bytes``: what a variant takes. Not here: the counting (``ops/cost``)."""

import json
from pathlib import Path

from assay.ops.suites.subject import Result, Subject, metric
from assay.schemas.protocols import Bytes


def bytes(protocol: Bytes, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Bytes of the stored tensors, of the draft's, and of a token of context, and what a decoded token reads and multiplies; exact, hence without
    standard error.

    A draft that is the very checkpoint it drafts for is stored once.
    """
    from assay.ops.cost.bytes import artifact_bytes, kv_bytes_per_token, kv_shape
    from assay.ops.cost.reads import reads

    def kv(checkpoint: Path, kv_format: str | None) -> int:
        return kv_bytes_per_token(*kv_shape(json.loads((checkpoint / "config.json").read_text())), kv_format or protocol.kv_dtype)

    own = artifact_bytes(subject.checkpoint)
    draft_checkpoint, draft_kv = (subject.draft.checkpoint, subject.draft.kv_format) if subject.draft else (None, None)
    shared = draft_checkpoint == subject.checkpoint
    draft_bytes = artifact_bytes(draft_checkpoint).size_bytes if draft_checkpoint and not shared else 0
    metrics = [
        metric("size_bytes", own.size_bytes + draft_bytes, "B", 1),
        metric("weight_bytes", own.size_bytes, "B", 1),
        metric("draft_bytes", draft_bytes, "B", 1),
        metric("kv_bytes_per_token", kv(subject.checkpoint, subject.kv_format), "B", 1),
        metric("bits_per_weight", own.bits_per_weight, "bit", own.weights),
    ]
    if own.quantized_bits_per_weight is not None:
        metrics.append(metric("quantized_bits_per_weight", own.quantized_bits_per_weight, "bit", own.quantized_weights))
    read = reads(subject.checkpoint)
    metrics += [
        metric("step_weight_bytes", read.weight_bytes, "B", 1),
        metric("block_parameters", read.block_parameters, "1", 1),
        metric("head_parameters", read.head_parameters, "1", 1),
        metric("attention_flops_per_context_token", read.attention_flops_per_context_token, "FLOP", 1),
    ]
    if draft_checkpoint:
        drafted = reads(draft_checkpoint)
        metrics += [
            metric("draft_kv_bytes_per_token", kv(draft_checkpoint, draft_kv), "B", 1),
            metric("draft_step_weight_bytes", drafted.weight_bytes, "B", 1),
            metric("draft_matmul_parameters", drafted.matmul_parameters, "1", 1),
        ]
    return Result(metrics, [], {}, own._asdict())
