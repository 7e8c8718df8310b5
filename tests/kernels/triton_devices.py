"""Where the cases of the Triton kernels run: on CUDA, or in Triton's interpreter, which has to be chosen before Triton is imported and is mended here."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def mend_the_interpreter() -> None:
    """Triton 3.7 interprets bfloat16 as integers in a product, and cuts where a device rounds to it; here it computes what a device does."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(self, source, to):
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return handle(values.view(torch.uint16).numpy(), tl.bfloat16)
        return cast(self, source, to)

    def multiplied(self, one, other, *rest):
        one, other = (
            handle((each.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if each.dtype.scalar == tl.bfloat16 else each
            for each in (one, other)
        )
        return dot(self, one, other, *rest)

    builder.cast_impl, builder.create_dot = rounded, multiplied


if INTERPRETED:
    mend_the_interpreter()


def poisoned(*shape, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of NaN (of integers: of -77), and a tensor in the middle of it."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 256,), torch.nan if dtype.is_floating_point else -77, dtype=dtype, device=DEVICE)
    return whole, whole[128:-128].view(shape)


def untouched(whole: torch.Tensor) -> bool:
    around = torch.cat((whole[:128], whole[-128:]))
    return bool((around.isnan() if whole.dtype.is_floating_point else around == -77).all())


def randn(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
