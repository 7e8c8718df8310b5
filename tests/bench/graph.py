"""What the graph itself costs: a re-run in which all is cached, and loading definitions, as wall seconds of whole processes.

    python tests/bench/graph.py [--experiment combinations]

Without an experiment it builds one of 72 variants on a tiny model first (a minute or two), in a temporary directory. With one it times the re-run of that
experiment in the home that ASSAY_HOME names, which must have been run before.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDE = """
name: wide
base: {{path: base, dtype: float32}}
axes:
  quantize: {{none: [], {quantize}}}
  kv: {{none: [], kv_int8: [{{kind: kv, format: int8}}], kv_fp8: [{{kind: kv, format: fp8_e4m3}}]}}
  draft: {{none: [], {draft}}}
measure: [{{suite: divergence, text: {{path: text.txt}}, tokens: 64, window: 32}}, bytes]
"""


def wide(formats: int, drafts: int) -> str:
    """(formats + 1) × 3 × (drafts + 1) variants."""
    choices = [(f, g, s) for f in ("int8", "int4", "int3", "int2") for g in (32, 64) for s in ("true", "false")][:formats]
    quantize = ", ".join(f"{f}_{g}_{s}: [{{kind: quantize, format: {f}, group_size: {g}, symmetric: {s}}}]" for f, g, s in choices)
    draft = ", ".join(f"ngram{n}: [{{kind: draft, method: ngram, tokens: {n}}}]" for n in range(2, 2 + drafts))
    return WIDE.format(quantize=quantize, draft=draft)


def make_base(directory: Path) -> None:
    """A tiny Llama with one token a byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).save_pretrained(directory)
    words = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ċ"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>").save_pretrained(directory)


def seconds(program: list[str], environment: dict[str, str], *, runs: int = 3) -> tuple[float, str]:
    """The median wall time of ``program``, and what it printed last."""
    taken, text = [], ""
    for _ in range(runs):
        began = time.perf_counter()
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
        taken.append(time.perf_counter() - began)
        text = done.stdout
        if done.returncode:
            sys.exit(done.stderr[-2000:])
    return statistics.median(taken), text


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--experiment")
    asked = options.parse_args()
    assay = [sys.executable, "-c", "from assay.definitions import main; main()"]
    load = [sys.executable, "-c", "from assay.definitions import defs; print(len(list(defs().resolve_all_asset_specs())))"]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        environment = {**os.environ, "ASSAY_EXPERIMENTS": temporary}
        if asked.experiment is None:
            make_base(place / "base")
            (place / "text.txt").write_text("some words to read, and 12 numbers too. " * 40)
            (place / "wide.yaml").write_text(wide(11, 1))
            environment["ASSAY_HOME"] = str(place / "home")
            first, _ = seconds([*assay, "run", "wide"], environment, runs=1)
            print(f"first run of 72 variants, everything built   {first:7.1f} s")
        again, text = seconds([*assay, "run", asked.experiment or "wide"], environment)
        print(f"run again, everything cached                 {again:7.1f} s   ({text.splitlines()[1]})")
        lean = {**environment, "ASSAY_HOME": str(place / "other")}
        (place / "wide.yaml").write_text(wide(16, 3).replace("name: wide", "name: wider"))
        if not (place / "base").exists():
            make_base(place / "base")
            (place / "text.txt").write_text("some words to read, and 12 numbers too. " * 40)
        taken, text = seconds(load, lean)
        print(f"definitions of 204 variants and our own      {taken:7.1f} s   ({text.strip()} assets; interpreter and imports included)")


if __name__ == "__main__":
    main()
