"""What a step is given, as ops take it: windows of text. Not here: any step."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def require_windows(windows: "Tensor | None", what: str) -> "Tensor":
    """The windows of a step that needs some; ``what`` says that it does, such as ``awq looks at text``.

    Raises:
        ValueError: there are none, or none with a token.
    """
    if windows is None or not windows.numel():
        given = "none" if windows is None else f"{list(windows.shape)} of them"
        raise ValueError(f"{what}; got {given}, give windows: token ids of shape [windows, length]")
    return windows
