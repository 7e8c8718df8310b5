"""What recovery costs, beside a bare PyTorch loop that makes the same passes: teacher forward, student forward, KL, backward, clipping, AdamW.

    python tests/bench/train.py [--base DIRECTORY | --smollm2] [--steps 4] [--rows 4] [--length 256] [--repeats 3] [--threads 2] [--clock wall] [--bf16]

Prints JSON: tokens/s of each way, the medians of interleaved repeats, and its ratio to the bare loop's (at least 0.8 is the aim). ``states`` and
``top_k`` look the teacher up. Without ``--base`` random models are used: small ones, or with ``--smollm2`` of the shape of SmolLM2-135M. The student
is the teacher without a fifth of its blocks. Whole calls are timed, with their checks and two small evaluations, which weigh where steps are few.
``other_cpu_share`` says how quiet the machine was; with ``--clock cpu --threads 1`` the ratios are of CPU time, which others disturb less.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from assay.ops.evaluate.divergence import head_of
from assay.ops.evaluate.timing import interleave_times, synchronise
from assay.ops.prune.depth import drop_layers
from assay.ops.train.loop import Settings
from assay.ops.train.overlap import states_of
from assay.ops.train.recover import recover
from assay.ops.train.teachers import CachedStates, CachedTopK, teacher_states, top_k_logits

SMALL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def bare(student: Any, teacher: Any, windows: torch.Tensor, rows: int, settings: Settings, bf16: bool) -> None:
    """The loop that one would write by hand, with all logits at once."""
    optimizer = torch.optim.AdamW(
        student.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    student.train()
    for step in range(settings.steps):
        ids = windows[step * rows : (step + 1) * rows].to(student.device)
        with torch.autocast(student.device.type, torch.bfloat16, enabled=bf16):
            with torch.no_grad():
                known = teacher(input_ids=ids, use_cache=False).logits
            logits = student(input_ids=ids, use_cache=False).logits
        p, q = known.float().log_softmax(-1), logits.float().log_softmax(-1)
        loss = torch.nn.functional.kl_div(q.flatten(0, 1), p.flatten(0, 1), reduction="batchmean", log_target=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.detach().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a checkpoint directory")
    parser.add_argument("--smollm2", action="store_true")
    for name, default in (("steps", 4), ("rows", 4), ("length", 256), ("repeats", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--bf16", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if asked.base:
        teacher = AutoModelForCausalLM.from_pretrained(asked.base, dtype=torch.float32)
    else:
        teacher = LlamaForCausalLM(LlamaConfig(**(SMOLLM2 if asked.smollm2 else SMALL), tie_word_embeddings=True))
    teacher = teacher.to(device).eval().requires_grad_(False)
    layers = teacher.config.num_hidden_layers
    student = copy.deepcopy(teacher).requires_grad_(True)
    drop_layers(student, range(layers - 1 - layers // 5, layers - 1))
    ids = torch.randint(
        3, teacher.config.vocab_size, (asked.steps * asked.rows + 1, asked.length), generator=torch.Generator().manual_seed(0)
    )
    windows, held_out = ids[:-1], ids[-1:, :16]
    settings = Settings(steps=asked.steps, learning_rate=1e-4, record_every=asked.steps, evaluate_every=asked.steps)
    held, head = states_of(teacher, held_out), head_of(teacher)
    ways: dict[str, Any] = {
        "model": teacher, "states": CachedStates(teacher_states(teacher, windows), held, head),
        "top_k": CachedTopK(top_k_logits(teacher, windows, 64), held, head),
    }  # fmt: skip

    def ours(way: str) -> Any:
        own = copy.deepcopy(student)

        def run() -> None:
            recover(own, ways[way], windows, held_out, settings=settings, rows=asked.rows, bf16=asked.bf16)
            synchronise()

        return run

    def by_hand() -> Any:
        own = copy.deepcopy(student)

        def run() -> None:
            bare(own, teacher, windows, asked.rows, settings, asked.bf16)
            synchronise()

        return run

    clock = time.process_time if asked.clock == "cpu" else time.perf_counter
    times = interleave_times({"bare": by_hand(), **{way: ours(way) for way in ways}}, repeats=asked.repeats, warmup=1, clock=clock)
    tokens = windows.numel()
    print(
        json.dumps(
            {
                "device": device, "threads": asked.threads, "clock": asked.clock, "bf16": asked.bf16, "tokens": tokens, "repeats": asked.repeats,
                "parameters": [sum(parameter.numel() for parameter in model.parameters()) for model in (teacher, student)],
                "tokens_s": {name: tokens / each.median for name, each in times.items()},
                "ratio_to_bare": {name: times["bare"].median / each.median for name, each in times.items()},
                "other_cpu_share": {name: each.other_cpu_share for name, each in times.items()},
            },
            indent=1,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
