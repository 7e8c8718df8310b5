"""The suite ``speed``: prefill and decode rates. Not here: how times are taken (``ops/evaluate/timing.py``)."""

from pathlib import Path
from typing import Any

from assay.ops.suites.subject import Result, Subject, draft_of, metric, prompts_of, runner_of, tokenizer_of
from assay.schemas.protocols import Speed


def speed(protocol: Speed, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Greedy prefill and decode rates, every variant in one engine; with a draft, decoding with and without it by turns. End-of-sequence tokens are
    ignored: the length is fixed."""
    import torch

    from assay.ops.decode.generate import generate
    from assay.ops.decode.speculate import speculative_generate
    from assay.ops.evaluate.speed import decode_speeds, emitted, prefill_speed
    from assay.ops.evaluate.timing import peak_rss_bytes, reset_peak_rss

    since_reset = reset_peak_rss()
    runner, tokenizer = runner_of(subject.checkpoint, protocol.dtype), tokenizer_of(subject.checkpoint)
    short, long = (
        prompts_of(protocol, tokenizer, protocol.batch, length, experiment_dir)
        for length in (protocol.prompt_tokens, protocol.prefill_tokens)
    )
    settings: dict[str, Any] = {"max_new_tokens": protocol.new_tokens, "kv_format": subject.kv_format, "vocabulary": len(tokenizer)}
    runs = {"decode_tok_s": lambda: emitted(generate(runner, short, **settings))}
    if subject.draft is not None:
        draft, gamma = draft_of(subject, protocol.dtype)
        runs = {
            "decode_no_draft_tok_s": runs["decode_tok_s"],
            "decode_tok_s": lambda: emitted(speculative_generate(runner, draft, short, gamma=gamma, **settings)),
        }
    rates = {
        "prefill_tok_s": prefill_speed(runner, long, kv_format=subject.kv_format, repeats=protocol.repeats),
        **decode_speeds(runs, repeats=protocol.repeats),
    }
    threads = torch.get_num_threads()
    metrics = [
        metric(name, rate.tok_s, "tok/s", len(rate.times.seconds), rate.standard_error, status=rate.times.status, threads=threads, path=runner.path,
               other_cpu_share=rate.times.other_cpu_share)
        for name, rate in rates.items()
    ]  # fmt: skip
    metrics.append(metric("peak_rss_bytes", peak_rss_bytes(), "B", 1, threads=threads, path=runner.path))
    notes = {"seconds": {name: list(rate.times.seconds) for name, rate in rates.items()}, "peak_rss_since_reset": since_reset}
    return Result(metrics, [], {}, notes)
