"""What SparseGPT costs beside the products that it cannot do without, and whether zeros make a product faster.

    python tests/bench/sparse.py [--repeats N]

Prints JSON with the ratios that are to hold. A solve of [N, K] is N K² + 128 N K + 4/3 K³ operations (as in ``gptq.py``) at the rate of a dense product
measured between the solves, on one thread and in CPU time, which others disturb less; in a narrow layer what a column costs in Python is most of it. A
dense product has no use for zeros, so that its ratio is to be near 1; on CUDA a 2:4 weight in torch's semi-structured form is timed beside the dense one in
bfloat16, in wall time.
"""

import argparse
import json
import time
from collections.abc import Callable

SHAPES = {"up": (1536, 576), "down": (576, 1536), "large": (4096, 4096)}
AT_MOST = {"up": 14, "down": 5, "large": 2.5}  # of 50 % and of 2:4
PRODUCT = (2048, 2048)  # of the weight that is half zeros
TOKENS = (1, 16, 512, 4096)


def silent(function: Callable[..., object], *args: object, **kwargs: object) -> Callable[[], None]:
    """The call, for its time alone."""

    def call() -> None:
        function(*args, **kwargs)

    return call


def solves(repeats: int) -> dict[str, object]:
    import torch

    from assay.ops.evaluate.timing import interleave_times
    from assay.ops.prune.masks import Sparsity
    from assay.ops.prune.sparsegpt import sparsegpt
    from assay.ops.quantize.grid import Format
    from assay.ops.quantize.hessian import Hessian

    square = torch.randn(2048, 2048)
    out = torch.empty_like(square)
    ways = {"50%": (Sparsity(50), None), "2:4": (Sparsity(n=2, m=4), None), "50% int4": (Sparsity(50), Format())}
    found: dict[str, object] = {}
    for name, (rows, cols) in SHAPES.items():
        torch.manual_seed(0)
        weight, inputs = 0.02 * torch.randn(rows, cols), torch.randn(4096, cols)
        inputs += inputs.roll(1, dims=1)
        hessian = Hessian(cols)
        hessian.add(inputs)
        matrix = hessian.matrix()
        fns = {way: silent(sparsegpt, weight, matrix, sparsity, format=format) for way, (sparsity, format) in ways.items()}
        times = interleave_times(
            {"product": silent(torch.mm, square, square, out=out), **fns},
            repeats=repeats if cols < 4096 else 1, clock=time.process_time, warmup=1 if cols < 4096 else 0,
        )  # fmt: skip
        rate = 2 * 2048**3 / times["product"].median
        ideal = (rows * cols**2 + 128 * rows * cols + 4 / 3 * cols**3) / rate
        found[f"{name} {rows}x{cols}"] = {
            "product_gflops": round(rate / 1e9, 1), "ideal_s": round(ideal, 4), "at_most": AT_MOST[name],
            "solve_s": {way: round(times[way].median, 4) for way in ways}, "ratio": {way: round(times[way].median / ideal, 2) for way in ways},
            "other_cpu_share": times["50%"].other_cpu_share,
        }  # fmt: skip
    return found


def products(repeats: int) -> dict[str, object]:
    """Time with half of the weight zero over the time without, by the number of tokens."""
    import torch

    from assay.ops.evaluate.timing import interleave_times
    from assay.ops.prune.masks import Sparsity, select
    from assay.ops.quantize.semi_structured import pack, to_torch

    cuda = torch.cuda.is_available()
    dense = torch.randn(PRODUCT, dtype=torch.bfloat16 if cuda else torch.float32, device="cuda" if cuda else "cpu")
    pruned = dense.masked_fill(select(dense.float().abs(), Sparsity(n=2, m=4)), 0)
    found: dict[str, object] = {}
    for tokens in TOKENS:
        inputs = torch.randn(tokens, PRODUCT[1], dtype=dense.dtype, device=dense.device)
        weights = {"dense": dense, "zeros": pruned} | ({"2:4": to_torch(pack(pruned))} if cuda else {})
        fns = {name: silent(torch.nn.functional.linear, inputs, weight) for name, weight in weights.items()}
        times = interleave_times(fns, repeats=max(repeats, 11), clock=time.perf_counter if cuda else time.process_time)
        found[f"{tokens} tokens"] = {
            f"{name} / dense": round(times[name].median / times["dense"].median, 2) for name in weights if name != "dense"
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print(json.dumps({"solves": solves(asked.repeats), "products": products(asked.repeats)}, indent=1))


if __name__ == "__main__":
    main()
