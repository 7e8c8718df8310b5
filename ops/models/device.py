"""Where models are run. Not here: opening one."""


def device() -> str:
    """``cuda`` where there is one, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def fast_in_bfloat16(where: str) -> bool:
    """Whether matrix products of bfloat16 take much less time than those of float32 there: on CUDA, and on a CPU that has AMX tiles."""
    import torch

    return where == "cuda" or bool(torch.cpu.get_capabilities().get("amx_bf16"))
