"""Which runner decodes a checkpoint here: the fastest that computes what is asked. Not here: any of them.

On a CPU in float32 that is the native decoder, over the weights as they are stored; where there is none, and for a mixture of experts, it is torch. On
CUDA it is torch in CUDA graphs with the kernels of Triton, which comes with torch there. Nothing falls back unseen: a runner's ``path`` says how it
computes, and every timing stores it.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

from assay.kernels import native
from assay.kernels.graphs import GraphRunner
from assay.ops.decode.architecture import Architecture
from assay.ops.decode.forward import TorchRunner
from assay.ops.decode.runner import Runner
from assay.ops.decode.weights import Weights, open_weights


def open_runner(directory: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Runner:
    """The decoder of a checkpoint of ours, dense or packed.

    Args:
        dtype: of the arithmetic.
    Raises:
        FileNotFoundError: no checkpoint in ``directory``.
        ValueError: a family or a quantization that the engine does not run, by its config alone; or weights missing or left over.
    """
    return runner_of(*open_weights(directory), dtype=dtype, device=device)


def runner_of(shape: Architecture, weights: Weights, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Runner:
    """The same of weights in memory."""
    device = torch.device(device)
    if device.type == "cpu" and dtype == torch.float32 and not shape.experts and native.levels():
        return native.NativeRunner(shape, weights)
    if device.type == "cuda":
        return _on_cuda(shape, weights, dtype, device)
    return TorchRunner(shape, weights, dtype=dtype, device=device)


def _on_cuda(shape: Architecture, weights: Weights, dtype: torch.dtype, device: torch.device) -> GraphRunner:
    if find_spec("triton") is None:
        return GraphRunner(TorchRunner(shape, weights, dtype=dtype, device=device), name="cuda graph without triton,")
    from assay.kernels.triton_inputs import prepare
    from assay.kernels.triton_linear import hold
    from assay.kernels.triton_norm import rms_norm

    packed = any(not isinstance(matrix.weight, torch.Tensor) for matrix in weights.matrices())
    runner = TorchRunner(shape, weights, dtype=dtype, device=device, hold=hold if packed else None, prepare=prepare, norm=rms_norm)
    return GraphRunner(runner)
