"""Questions per second of the suite ``choice``, beside lm-evaluation-harness's own Hugging Face model, and whether every answer is the same.

    python tests/bench/choice.py --base DIRECTORY [--tasks piqa,boolq] [--questions 50] [--shots 0] [--batch 16] [--threads 1] [--repeats 1] [--clock cpu]

Prints JSON: of each task the seconds of both over the same prompts, taken in turns, their ratio (at least 2 is the aim), the questions whose accuracy
differs (none is the aim) and the largest difference of a log-likelihood; and the same of all tasks together. Both are float32 with the same rows side by
side, through the same evaluation; loading a model is not counted. With ``--clock cpu --threads 1`` others on the machine disturb less.
``--profile`` lists where the time of our own goes instead.
"""

import argparse
import cProfile
import json
import os
import time
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from assay.ops.evaluate.timing import interleave_times
from assay.ops.suites.subject import Subject
from assay.ops.suites.tasks import evaluate, open_lm, quiet
from assay.ops.tasks.packaged import packaged_tasks
from assay.schemas.tasks import ChoiceTask


def open_hf(base: Path, batch: int) -> Any:
    from lm_eval.models.huggingface import HFLM

    with quiet():
        return HFLM(pretrained=str(base), dtype="float32", device="cpu", batch_size=batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a checkpoint directory")
    parser.add_argument("--tasks", default=",".join(sorted(get_args(ChoiceTask))))
    for name, default in (("questions", 50), ("shots", 0), ("batch", 16), ("threads", 1), ("repeats", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    subject = Subject(asked.base, None, None, asked.base)
    ours = open_lm(subject, dtype="float32", batch=asked.batch, seed=0)
    clock = time.process_time if asked.clock == "cpu" else time.perf_counter
    names = asked.tasks.split(",")

    def run(lm: Any, name: str, kept: dict[str, Any]) -> None:
        with quiet():
            tasks = packaged_tasks([name], questions=asked.questions, seed=0, shots=asked.shots)
        kept[name] = evaluate(lm, tasks, chat=False)["samples"][name]

    if asked.profile:
        profile = cProfile.Profile()
        for name in names:
            profile.runcall(run, ours, name, {})
        profile.print_stats("tottime")
        return
    theirs = open_hf(asked.base, asked.batch)
    mine: dict[str, Any] = {}
    others: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        times = interleave_times(
            {"ours": lambda name=name: run(ours, name, mine), "hf": lambda name=name: run(theirs, name, others)},
            repeats=asked.repeats, warmup=0, clock=clock,
        )  # fmt: skip
        pairs = list(zip(mine[name], others[name], strict=True))
        gaps = [abs(one - other) for a, b in pairs for (one, _), (other, _) in zip(a["filtered_resps"], b["filtered_resps"], strict=True)]
        rows[name] = {
            "questions": len(pairs), "ours_s": times["ours"].median, "hf_s": times["hf"].median,
            "questions_per_s": len(pairs) / times["ours"].median, "ratio": times["hf"].median / times["ours"].median,
            "accuracy": sum(a["acc"] for a, _ in pairs) / len(pairs), "accuracy_normalised": sum(a["acc_bytes"] for a, _ in pairs) / len(pairs),
            "different_answers": sum(a["acc"] != b["acc"] or a["acc_bytes"] != b["acc_bytes"] for a, b in pairs), "largest_gap_nats": max(gaps),
        }  # fmt: skip
        print(json.dumps({name: rows[name]}), flush=True)
    mine_s, hf_s = (sum(row[which] for row in rows.values()) for which in ("ours_s", "hf_s"))
    print(
        json.dumps(
            {
                "path": ours.runner.path, "clock": asked.clock, "threads": asked.threads, "batch": asked.batch, "shots": asked.shots,
                "ratio_of_all": hf_s / mine_s, "different_answers": sum(row["different_answers"] for row in rows.values()),
            },
            indent=1,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
