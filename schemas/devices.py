"""What is known of devices and of models without having them: datasheets and published shapes. Not here: what was measured (``facts.DeviceConstant``)."""

from pydantic import Field

from assay.schemas.base import Shape
from assay.schemas.spec import Spec


class Datasheet(Spec):
    """A device as its maker describes it: peak numbers, of dense arithmetic, which no program reaches."""

    name: str
    memory_gb: float = Field(gt=0, description="10^9 bytes")
    bandwidth_gb_s: float = Field(gt=0, description="10^9 bytes a second")
    tflop_s: dict[str, float] = Field(description="10^12 FLOPs a second by dtype: bfloat16, fp8_e4m3, int8, fp4; without sparsity")
    source: str = Field(description="the document that says so")


class ModelShape(Shape):
    """The widths of a published model, by which it can be reckoned with although it is not here."""

    name: str
    gated: bool = Field(default=True, description="whether its MLP has three matrices; otherwise two")
    source: str
