"""The suite ``distribution``: how spread a model's next-token distributions on a text are, and what temperature and filters make of them.

Not here: its arithmetic (``ops/evaluate/distribution.py``).
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.ops.suites.subject import Result, Subject, metric, model_of, tokenizer_of
from assay.schemas.protocols import Distribution

if TYPE_CHECKING:
    from torch import Tensor

UNITS = {"entropy_mean_nats": "nats", "varentropy_mean_nats2": "nats²", "kept_tokens": "token"}
CHECKED = 32  # positions at which the law of the entropy's slope is checked, spread over the text


def distribution(protocol: Distribution, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Entropy, varentropy, tails and kept sets at each temperature of ``protocol``, averaged over the positions of its text.

    Without a slice, entropy and varentropy are those of the model's own distribution (temperature 1), and the residual of the law dH/dT = Var(z)/T³ is
    the largest of all temperatures. Ids that the tokenizer lacks are left out, as when decoding. A draft changes no distribution and is not used.

    Raises:
        ValueError: the text is too short, or a position has no distribution.
    """
    import torch

    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import token_stream
    from assay.ops.evaluate.distribution import Slice, law_residual, spread
    from assay.ops.evaluate.divergence import check_head, final_hidden, head_of
    from assay.ops.evaluate.windows import batches, bos_of, windows
    from assay.ops.kv.cache import make_cache
    from assay.ops.models.checkpoint import weights_path

    model, tokenizer = model_of(subject.checkpoint, protocol.dtype), tokenizer_of(subject.checkpoint)
    stream = token_stream(tokenizer, documents(**protocol.text.model_dump(), directory=experiment_dir), protocol.tokens)
    cover = windows(len(stream.ids), protocol.window, protocol.window - 1)
    bos, head = bos_of(tokenizer, "tokenizer"), head_of(model)
    check_head(model, head, stream.ids.to(model.device))
    head = head.cut(len(tokenizer))
    hidden = torch.empty(len(stream.ids) - 1, head.weight.shape[1], device=model.device)
    for batch in batches(stream.ids, cover, batch=protocol.batch, bos=bos):
        cache = make_cache(model, subject.kv_format) if subject.kv_format else None
        states = final_hidden(model, batch.ids.to(model.device), batch.mask.to(model.device), cache)
        hidden[batch.at.to(model.device) - 1] = states[batch.rows, batch.columns].float()
    window = torch.cat([torch.full((each.stop - each.first,), index) for index, each in enumerate(cover)])

    found = spread(hidden, head, temperatures=sorted({1.0, *protocol.temperatures}), ks=protocol.top_k)
    path = weights_path(subject.checkpoint)
    own = {name: found[Slice(name, "temperature", "1")] for name in ("entropy_mean_nats", "varentropy_mean_nats2")}
    metrics = [_mean(name, values, window, path=path) for name, values in own.items()]
    wanted = {f"{temperature:g}" for temperature in protocol.temperatures}
    for (name, kind, part), values in found.items():
        at = part.split("/")[1 if kind.startswith("filter") else 0]
        if at in wanted:
            metrics.append(_mean(name, values, window, path=path, slice_kind=kind, slice=part))
    checked = hidden[torch.linspace(0, len(hidden) - 1, min(CHECKED, len(hidden)), device=hidden.device).long().unique()]
    residuals = {at: law_residual(checked, head, temperature=at) for at in protocol.temperatures}
    metrics.append(_largest(torch.cat(list(residuals.values())), path=path))
    metrics += [_largest(values, path=path, slice_kind="temperature", slice=f"{at:g}") for at, values in residuals.items()]
    items = [
        {"item": index, "metric": "entropy_mean_nats", "value": _finite(float(own["entropy_mean_nats"][window == index].mean()))}
        for index in range(len(cover))
    ]
    notes = {"windows": len(cover), "targets": len(hidden), "bos": bos, "vocabulary": len(head.weight), "standard_error": "clustered by window",
             "law_checked_at": len(checked)}  # fmt: skip
    return Result(metrics, items, {}, notes)


def _mean(name: str, values: "Tensor", window: "Tensor", **more: Any) -> dict[str, Any]:
    from assay.ops.evaluate.summarise import standard_error

    return metric(name, _finite(float(values.mean())), UNITS.get(name, "1"), len(values), standard_error(values, window), **more)


def _largest(values: "Tensor", **more: Any) -> dict[str, Any]:
    return metric("entropy_law_residual", _finite(float(values.max())), "nats", len(values), **more)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
