"""Does a packed format pay? Each format of the default base beside its bfloat16, by turns in one run: decoding alone, a batch, and a prompt.

    python tests/bench/formats.py [--rounds 5] [--checkpoint DIRECTORY] [--formats int4,nf4,...]

The linear layers of the blocks are rounded to nearest; embedding and head stay bfloat16 for all. Prints tokens/s, medians of the rounds, and the ratio to
bfloat16; a ratio below 1 says where the format does not pay. ``--rows`` shows at which batch each stops paying.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from assay.kernels.engine import runner_of
from assay.ops.decode.session import Session
from assay.ops.decode.weights import Matrix, Weights, open_weights
from assay.ops.quantize.grid import Format, quantize

FORMATS = {
    "int8": Format("int", 8, 64), "int4": Format("int", 4, 64), "int4 zero": Format("int", 4, 64, symmetric=False), "int3": Format("int", 3, 64),
    "fp8_e4m3": Format("e4m3", 8, -1), "fp8_e5m2": Format("e5m2", 8, -1), "mxfp8": Format("e4m3", 8, 32, scale="e8m0"),
    "mxfp4": Format("e2m1", 4, 32, scale="e8m0"), "nvfp4": Format("e2m1", 4, 16, scale="e4m3"), "nf4": Format("nf4", 4, 64, scale="float32"),
    "ternary": Format("ternary", 2, 0),
}  # fmt: skip
STEPS = 24
PROMPT = 32


def rounded(weights: Weights, format: Format | None) -> Weights:
    """``weights`` with the matrices of the blocks in ``format``."""
    if format is None:
        return weights

    def matrix(each: Matrix) -> Matrix:
        return each._replace(weight=quantize(each.dense(torch.float32), format))

    blocks = (
        block._replace(
            **{name: matrix(getattr(block, name)) for name in "qkvo"}, mlps=tuple(type(mlp)(*map(matrix, mlp)) for mlp in block.mlps)
        )
        for block in weights.blocks
    )
    return weights._replace(blocks=tuple(blocks))


def decode(runner, rows: int) -> float:
    """Tokens/s of ``rows`` texts side by side."""
    session = Session(runner, rows=rows, capacity=PROMPT + STEPS + 1)
    session.read([[7 + row, *range(3, PROMPT + 2)] for row in range(rows)])
    begun = time.perf_counter()
    for step in range(STEPS):
        session.read([[11 + step]] * rows)
    return rows * STEPS / (time.perf_counter() - begun)


def prefill(runner, tokens: int) -> float:
    session, begun = Session(runner, capacity=tokens), time.perf_counter()
    session.read([list(range(3, tokens + 3))])
    return tokens / (time.perf_counter() - begun)


def default_base() -> Path:
    from assay.assets.registry import registries
    from assay.ops.apply import import_base

    out = Path(tempfile.mkdtemp())
    import_base(registries().bases["smollm2-135m-instruct"], out)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, help="a dense checkpoint; the default base, imported anew, when left out")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,8", help="batches to decode")
    parser.add_argument("--prefill", default="512", help="lengths of prompts")
    options = parser.parse_args()
    shape, weights = open_weights(options.checkpoint or default_base())
    runners = {"bfloat16": runner_of(shape, weights)}
    for name in options.formats.split(","):
        runners[name] = runner_of(shape, rounded(weights, FORMATS[name]))
    tasks = {f"decode {rows}": lambda runner, rows=int(rows): decode(runner, rows) for rows in options.rows.split(",")}
    tasks |= {
        f"prefill {length}": lambda runner, length=int(length): prefill(runner, length) for length in options.prefill.split(",") if length
    }
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(options.rounds + 1):  # the first warms up
        for task, run in tasks.items():
            for name, runner in runners.items():
                rate = run(runner)
                if turn:
                    rates.setdefault((name, task), []).append(rate)
    print(f"{'format':10} " + " ".join(f"{task:>18}" for task in tasks) + "  path")
    for name, runner in runners.items():
        cells = []
        for task in tasks:
            ratio = statistics.median(mine / base for mine, base in zip(rates[name, task], rates["bfloat16", task], strict=True))
            cells.append(f"{statistics.median(rates[name, task]):8.1f} ({ratio:5.2f} x)")
        print(f"{name:10} " + " ".join(f"{cell:>18}" for cell in cells) + f"  {runner.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
