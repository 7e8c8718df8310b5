"""The engine beside transformers and llama.cpp: tokens/s of decoding and prefill, taken by turns on one machine, as medians and ratios.

    python tests/bench/decode.py                                            ours and transformers
    python tests/bench/decode.py --llama PYTHON --gguf DIRECTORY            and llama.cpp, by a Python of another environment that has llama_cpp

Each contestant is a process of its own that answers one command at a time, so that only one computes. The directory has .gguf files by the names of
``GGUF``; ``llama_model_quantize(allow_requantize=True)`` of llama_cpp makes the others from the packaged one in seconds. The share of the bandwidth limit is the
weight bytes that a token streams, over the measured read bandwidth, over the measured time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = "smollm2-135m-instruct"
GGUF = {
    "llama.cpp F16": "f16.gguf",
    "llama.cpp BF16": "bf16.gguf",
    "llama.cpp Q8_0": "q8_0.gguf",
    "llama.cpp Q4_1": "q4_1.gguf",
    "llama.cpp Q4_0": "q4_0.gguf",
}
OURS = {
    "ours bf16": None,
    "ours int8 g64, bf16 head": {"format": "int8"},
    "ours int4 g64, bf16 head": {"format": "int4", "symmetric": False},
    "ours int4 g64, int4 head": {"format": "int4", "symmetric": False, "embeddings": "quantize", "head": "quantize"},
}
TASKS = {"decode": 48, "batch 8": 24, "verify 5": 24, "prefill 512": 1}  # and how many steps of each are a sample
PROMPT = 32


# --- a contestant: reads a task a line, does it, answers with the seconds ---------------------------------------------------------------------


def compete(kind: str, path: str, threads: int) -> None:
    contestant = {"ours": ours, "transformers": transformers, "llama": llama, "read": read}[kind](path, threads)
    for line in sys.stdin:
        begun = time.process_time()
        seconds = contestant(line.strip())
        print(json.dumps([seconds, time.process_time() - begun]), flush=True)


def ours(path: str, threads: int):
    import torch

    from assay.kernels.engine import open_runner
    from assay.ops.decode.session import Session

    torch.set_num_threads(threads)
    runner = open_runner(Path(path))

    def task(name: str) -> float:
        rows = 8 if name == "batch 8" else 1
        if name == "prefill 512":
            session, begun = Session(runner, capacity=512), time.perf_counter()
            session.read([text(512)])
            return time.perf_counter() - begun
        width = 5 if name == "verify 5" else 1
        session = Session(runner, rows=rows, capacity=512)
        new = [logits.argmax().item() for logits in session.read([text(PROMPT)] * rows)]
        begun = time.perf_counter()
        for _ in range(TASKS[name]):
            if width == 1:
                new = [logits.argmax().item() for logits in session.read([[token] for token in new])]
            else:
                session.read([[token] * width for token in new], keep=width)
                session.rollback([width])
        return time.perf_counter() - begun

    return task


def transformers(path: str, threads: int):
    import torch

    from assay.ops.models.checkpoint import load_model

    torch.set_num_threads(threads)
    directory, dtype = path.split(":")
    model = load_model(Path(directory), dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def task(name: str) -> float:
        rows, width = (8 if name == "batch 8" else 1), (5 if name == "verify 5" else 1)
        ids = torch.tensor([text(512 if name == "prefill 512" else PROMPT)] * rows)
        begun = time.perf_counter()
        done = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        if name == "prefill 512":
            return time.perf_counter() - begun
        begun = time.perf_counter()
        for _ in range(TASKS[name]):
            new = done.logits[:, -1:].argmax(dim=-1).expand(rows, width)
            done = model(input_ids=new, use_cache=True, cache=done.past_key_values)
            if width > 1:
                done.past_key_values.crop(-width)
        return time.perf_counter() - begun

    return task


def llama(path: str, threads: int):
    import llama_cpp
    import numpy

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 8 * 512, 512, 512, 8
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def forward(ids: list[int], positions: list[int], rows: list[int], keep: set[int]) -> None:
        batch.n_tokens = len(ids)
        for at, (token, position, row) in enumerate(zip(ids, positions, rows, strict=True)):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = token, position, 1, row, at in keep
        assert llama_cpp.llama_decode(context, batch) == 0

    def best(at: int) -> int:
        return int(numpy.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, at), shape=(vocabulary,)).argmax())

    def task(name: str) -> float:
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_clear(memory, True)
        if name == "prefill 512":
            begun = time.perf_counter()
            forward(text(512), list(range(512)), [0] * 512, {511})
            best(511)
            return time.perf_counter() - begun
        rows, width = (8 if name == "batch 8" else 1), (5 if name == "verify 5" else 1)
        for row in range(rows):
            forward(text(PROMPT), list(range(PROMPT)), [row] * PROMPT, {PROMPT - 1})
        new, begun = [best(PROMPT - 1)] * rows, time.perf_counter()
        for step in range(TASKS[name]):
            if width == 1:
                forward(new, [PROMPT + step] * rows, list(range(rows)), set(range(rows)))
                new = [best(row) for row in range(rows)]
            else:
                forward(new * width, list(range(PROMPT, PROMPT + width)), [0] * width, set(range(width)))
                best(width - 1)
                llama_cpp.llama_memory_seq_rm(memory, 0, PROMPT, -1)
        return time.perf_counter() - begun

    return task


def read(path: str, threads: int):
    """Seconds to read 256 MB once, the bandwidth that a step could have."""
    import torch

    torch.set_num_threads(threads)
    held = torch.ones(2**26)

    def task(name: str) -> float:
        begun = time.perf_counter()
        held.sum()
        return time.perf_counter() - begun

    return task


def text(count: int) -> list[int]:
    return [(7919 * at + 101) % 40_000 + 100 for at in range(count)]


# --- the match --------------------------------------------------------------------------------------------------------------------------------


def checkpoints(directory: Path) -> dict[str, Path]:
    """The base and its rounded variants, as the graph would make them."""
    from assay.assets.registry import load_registries
    from assay.ops.apply import apply, import_base
    from assay.schemas.rounding import Quantize

    base = directory / "base"
    if not base.exists():
        base.mkdir(parents=True)
        import_base(load_registries().bases[BASE], base)
    found = {}
    for name, settings in OURS.items():
        found[name] = base
        if settings is not None:
            found[name] = directory / name.removeprefix("ours ").replace(" ", "_").replace(",", "")
            if not found[name].exists():
                found[name].mkdir()
                apply(Quantize(group_size=64, **settings), base, found[name])
    return found


def streamed_bytes(checkpoint: Path) -> int:
    """Bytes of the weights that one token passes, as the engine holds them."""
    from assay.kernels.panels import panels
    from assay.ops.decode.weights import open_weights

    total = 0
    for matrix in open_weights(checkpoint)[1].matrices():
        laid = panels(matrix)
        total += sum(part.nbytes for part in (laid.data, laid.scales, laid.zeros) if part is not None)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="where checkpoints lie or are to be made; temporary when left out")
    parser.add_argument("--llama", help="a Python that has llama_cpp")
    parser.add_argument("--gguf", type=Path, help="a directory of .gguf files")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        made = checkpoints(options.base or Path(temporary))
        commands = {name: [sys.executable, __file__, "ours", str(path)] for name, path in made.items()}
        import torch

        # Without instructions for it, torch multiplies bfloat16 ten times slower than float32.
        for dtype in ("float32", "bfloat16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",):
            commands[f"transformers {dtype}"] = [sys.executable, __file__, "transformers", f"{made['ours bf16']}:{dtype}"]
        if options.llama:
            commands |= {
                name: [options.llama, __file__, "llama", str(options.gguf / file)]
                for name, file in GGUF.items()
                if (options.gguf / file).exists()
            }
        commands["read"] = [sys.executable, __file__, "read", ""]
        play(commands, {name: streamed_bytes(path) for name, path in made.items()}, options.threads, options.rounds)


def play(commands: dict[str, list[str]], streamed: dict[str, int], threads: int, rounds: int) -> None:
    players = {
        name: subprocess.Popen(
            [*command, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        for name, command in commands.items()
    }

    def ask(name: str, task: str) -> float:
        player = players[name]
        assert player.stdin and player.stdout
        player.stdin.write(f"{task}\n")
        player.stdin.flush()
        answer = player.stdout.readline()
        if not answer:
            raise RuntimeError(f"{name} ended: {' '.join(commands[name])}")
        return json.loads(answer)[0]

    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for task in TASKS:
            for name in players:
                seconds = ask(name, task)
                if turn:  # the first is the warm-up
                    taken.setdefault((name, task), []).append(seconds)
    for player in players.values():
        player.kill()
    bandwidth = max(
        2**28 / seconds for (name, _), times in taken.items() if name == "read" for seconds in times
    )  # torch's sum is no perfect reader
    rates = {
        (name, task): {"decode": 1, "batch 8": 8, "verify 5": 5, "prefill 512": 512}[task] * TASKS[task] / statistics.median(times)
        for (name, task), times in taken.items()
        if name != "read"
    }
    print(f"{threads} threads, medians of {rounds} turns, best read bandwidth {bandwidth / 1e9:.1f} GB/s; tokens/s")
    print(f"{'':28}" + "".join(f"{task:>14}" for task in TASKS) + f"{'of the limit':>14}")
    for name in players:
        if name != "read":
            share = f"{streamed[name] * rates[name, 'decode'] / bandwidth:14.2f}" if name in streamed else ""
            print(f"{name:28}" + "".join(f"{rates[name, task]:14.1f}" for task in TASKS) + share)
    four, peers = "ours int4 g64, int4 head", [name for name in players if name.startswith("llama.cpp")]
    print("\nratios")
    for task in TASKS:
        print(f"  {task}: ours int4 over ours bf16 {rates[four, task] / rates['ours bf16', task]:.2f}")
        for mine, theirs in ((four, "llama.cpp Q4_1"), (four, "llama.cpp Q4_0"), ("ours int8 g64, bf16 head", "llama.cpp Q8_0"), ("ours bf16", "llama.cpp F16"),
                             ("ours bf16", "llama.cpp BF16"), ("ours bf16", "transformers float32")):  # fmt: skip
            if theirs in peers or theirs.startswith("transformers"):
                print(f"  {task}: {mine} over {theirs} {rates[mine, task] / rates[theirs, task]:.2f}")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("ours", "transformers", "llama", "read"):
        compete(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
