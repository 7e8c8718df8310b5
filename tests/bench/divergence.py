"""What the divergence of a variant costs, beside one plain forward with logits over the same tokens.

    python tests/bench/divergence.py [--base DIRECTORY] [--tokens 8192] [--window 512] [--batch 4] [--repeats 3] [--threads 2] [--clock wall]

Prints JSON: the medians of interleaved repeats, their ratio (at most 1.5 is the aim), and the peak resident memory of the divergence. Without
``--base`` a random model of the shape of SmolLM2-135M is made, and the variant is the base with its head and last block scaled by 1 %.
Run it on a quiet machine: ``other_cpu_share`` says how quiet it was. With ``--clock cpu --threads 1`` the ratio is of CPU time, which others disturb less.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from assay.ops.evaluate.divergence import BaseStatistics, final_hidden, head_of, per_token, reference
from assay.ops.evaluate.timing import interleave_times, peak_rss_bytes, reset_peak_rss
from assay.ops.evaluate.windows import batches, windows


def smollm2_shape() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            max_position_embeddings=8192, tie_word_embeddings=True,
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a checkpoint directory")
    for name, default in (("tokens", 8192), ("window", 512), ("batch", 4), ("repeats", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)

    def load() -> LlamaForCausalLM:
        model = AutoModelForCausalLM.from_pretrained(asked.base, dtype=torch.float32) if asked.base else smollm2_shape()
        return model.float().eval()

    model, variant = load(), load()
    variant.model.layers[-1].mlp.down_proj.weight.data.mul_(1.01)
    ids = torch.randint(3, model.config.vocab_size, (asked.tokens,), generator=torch.Generator().manual_seed(0))
    cover = windows(len(ids), asked.window, asked.window - 1)
    states = torch.empty(len(ids) - 1, model.config.hidden_size)
    for batch in batches(ids, cover, batch=asked.batch):
        states[batch.at - 1] = final_hidden(model, batch.ids, batch.mask)[batch.rows, batch.columns]
    base_head = head_of(model)
    statistics_of_base = reference(states, base_head, ids[1:])
    del model
    found: list[float] = []

    @torch.inference_mode()
    def plain() -> None:
        for batch in batches(ids, cover, batch=asked.batch):
            variant(input_ids=batch.ids, use_cache=False)

    def body() -> None:
        for batch in batches(ids, cover, batch=asked.batch):
            final_hidden(variant, batch.ids, batch.mask)

    def divergence() -> None:
        reset_peak_rss()
        total, head = 0.0, head_of(variant)
        for batch in batches(ids, cover, batch=asked.batch):
            at = batch.at - 1
            hidden = final_hidden(variant, batch.ids, batch.mask)[batch.rows, batch.columns]
            kept = BaseStatistics(*(part[at] for part in statistics_of_base))
            total += float(per_token(states[at], base_head, hidden, head, batch.targets, base=kept).kl.double().sum())
        found.append(total / (len(ids) - 1))
        peaks.append(peak_rss_bytes())

    peaks: list[int] = []
    clock = time.process_time if asked.clock == "cpu" else time.perf_counter
    times = interleave_times({"plain": plain, "body": body, "divergence": divergence}, repeats=asked.repeats, warmup=1, clock=clock)
    pairs = [one / other for one, other in zip(times["divergence"].seconds, times["plain"].seconds, strict=True)]
    print(
        json.dumps(
            {
                "tokens": len(ids), "threads": asked.threads, "clock": asked.clock, "repeats": asked.repeats, "kl_mean_nats": found[-1],
                "plain_forward_s": times["plain"].median, "body_s": times["body"].median, "divergence_s": times["divergence"].median,
                "ratio": times["divergence"].median / times["plain"].median, "ratio_of_pairs": statistics.median(pairs),
                "peak_rss_gb": max(peaks) / 1e9, "other_cpu_share": {name: each.other_cpu_share for name, each in times.items()},
            },
            indent=1,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
