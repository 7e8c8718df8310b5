"""The suite ``speed``: prefill and decode rates. Not here: how times are taken (``ops/evaluate/timing.py``)."""

from pathlib import Path
from typing import Any

from assay.ops.suites.subject import Result, Subject, draft_of, metric, model_of, prompts_of, tokenizer_of
from assay.schemas.protocols import Speed


def speed(protocol: Speed, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Prefill and decode rates, every variant in one loop; with a draft, decoding with and without it by turns. End-of-sequence tokens are ignored: the length is fixed.

    Raises:
        ValueError: a draft at a batch above 1, which speculation here does not do.
    """
    import torch

    from assay.ops.decode.generate import generate
    from assay.ops.decode.speculate import speculative_generate
    from assay.ops.evaluate.speed import batch_decode, decode_speeds, prefill_speed
    from assay.ops.evaluate.timing import peak_rss_bytes, reset_peak_rss
    from assay.ops.kv.cache import make_cache
    from assay.ops.models.checkpoint import weights_path

    if subject.draft and protocol.batch != 1:
        raise ValueError(f"speculation decodes one text at a time; got batch={protocol.batch} with a draft; use batch: 1")
    since_reset = reset_peak_rss()
    model, tokenizer = model_of(subject.checkpoint, protocol.dtype), tokenizer_of(subject.checkpoint)
    short, long = (
        torch.tensor(prompts_of(protocol, tokenizer, protocol.batch, length, experiment_dir), device=model.device)
        for length in (protocol.prompt_tokens, protocol.prefill_tokens)
    )

    def cache() -> Any:
        return make_cache(model, subject.kv_format)

    settings = {"max_new_tokens": protocol.new_tokens, "kv_format": subject.kv_format, "vocabulary": len(tokenizer)}

    def plain() -> tuple[int, float]:
        if protocol.batch > 1:
            rows, seconds = batch_decode(model, short, new_tokens=protocol.new_tokens, cache=cache())
            return len(rows) * (protocol.new_tokens - 1), seconds
        done = generate(model, short, **settings)
        return len(done.tokens) - 1, done.decode_seconds

    runs = {"decode_tok_s": plain}
    if subject.draft is not None:
        draft, gamma = draft_of(subject, protocol.dtype), subject.draft[1]

        def drafted() -> tuple[int, float]:
            done = speculative_generate(model, draft, short, gamma=gamma, **settings)
            return len(done.tokens) - 1, done.decode_seconds

        runs = {"decode_no_draft_tok_s": plain, "decode_tok_s": drafted}
    rates = {
        "prefill_tok_s": prefill_speed(model, long, make_cache=cache, repeats=protocol.repeats),
        **decode_speeds(runs, repeats=protocol.repeats),
    }
    threads, path = torch.get_num_threads(), weights_path(subject.checkpoint)
    metrics = [
        metric(name, rate.tok_s, "tok/s", len(rate.times.seconds), rate.standard_error, status=rate.times.status, threads=threads, path=path,
               other_cpu_share=rate.times.other_cpu_share)
        for name, rate in rates.items()
    ]  # fmt: skip
    metrics.append(metric("peak_rss_bytes", peak_rss_bytes(), "B", 1, threads=threads, path=path))
    notes = {"seconds": {name: list(rate.times.seconds) for name, rate in rates.items()}, "peak_rss_since_reset": since_reset}
    return Result(metrics, [], {}, notes)
