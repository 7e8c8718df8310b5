"""The rows of the warehouse, as the writers know them; ``warehouse/tables/*.sql`` says the same in SQL and a test compares the two.

Not here: anything wide, ranked or compared: those are views.
"""

import math
from datetime import datetime
from typing import Literal

from pydantic import Field, model_validator

from assay.schemas.spec import Spec

Status = Literal["ok", "noisy", "failed", "not_finite"]


class ExperimentRow(Spec):
    """An experiment as it was last declared: a variant that is no longer among ``variants`` is history and in no view.

    So are facts under a protocol that is not among ``protocols``: of before it was changed, or of another experiment that shares an artifact.
    """

    experiment: str
    question: str
    axes: list[str] = Field(description="axis names in declared order")
    variants: list[str] = Field(description="slugs in declared order")
    spec_json: str
    declared_at: datetime
    protocols: list[str] | None = Field(default=None, description="digests of its protocols; None: of a time when none were told")


class VariantRow(Spec):
    """A variant of an experiment and what it came to; written again whenever it is materialized, the latest ``recorded_at`` counts."""

    experiment: str
    variant: str = Field(
        description="the option names in axis order, joined by two underscores; the base is `base` when it is no grid point"
    )
    base: str
    artifact_digest: str = Field(description="of the whole variant, runtime steps included")
    target_digest: str = Field(description="without a draft: what defines the output distribution")
    checkpoint_digest: str = Field(description="of the weights alone")
    spec_json: str
    recorded_at: datetime


class VariantAxisRow(Spec):
    """The option that a variant takes on one axis."""

    experiment: str
    variant: str
    axis: str
    option: str


class StepRow(Spec):
    """One step as it was built: grain is the artifact it made."""

    artifact_digest: str
    key: str = Field(description="sha256 of the action: step, code, parents, data, seed, versions")
    kind: str
    spec_json: str
    code_fingerprint: str
    size_bytes: int = Field(ge=0)
    build_seconds: float = Field(ge=0)
    built_at: datetime
    summary_json: str | None = None


class LineageRow(Spec):
    """One parent of an artifact; ``role`` is parent, draft, teacher or base."""

    artifact_digest: str
    parent_digest: str
    role: Literal["parent", "draft", "teacher", "base"]


class ProtocolRow(Spec):
    """One way of measuring, whole."""

    protocol_digest: str
    name: str
    suite: str
    spec_json: str


class DeviceRow(Spec):
    """A machine and the part of it that computes."""

    device_digest: str
    kind: Literal["cpu", "cuda"]
    name: str
    cores: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    torch_version: str
    driver: str | None = None


class RunRow(Spec):
    """One execution that wrote facts."""

    run: str
    started_at: datetime
    experiment: str | None = None
    trigger: Literal["cli", "ui", "schedule", "test"] = "cli"


class Measurement(Spec):
    """One number about one artifact; append-only. A value that is not finite, or that failed, is NULL with a status that says so."""

    artifact_digest: str
    base_digest: str = Field(description="what a divergence compares with; the base's own digest elsewhere")
    protocol_digest: str
    suite: str
    metric: str
    slice_kind: Literal[
        "all",
        "token_class",
        "language",
        "position",
        "temperature",
        "temperature_k",
        "filter_temperature",
        "filter_temperature_k",
        "batch",
        "layer",
        "head",
        "tokens",
        "domain",
        "domain_tokens",
        "task",
        "task_metric",
        "task_k",
        "needle",
    ] = "all"
    slice: str = "all"
    value: float | None
    unit: str
    n: int = Field(ge=0, description="samples behind the value: tokens, prompts, repeats")
    standard_error: float | None = None
    status: Status = "ok"
    message: str | None = None
    seed: int = 0
    run: str
    device_digest: str | None = Field(default=None, description="only for timings")
    threads: int | None = None
    path: str | None = Field(default=None, description="how the weights were run: dense, dequantized, packed kernel …")
    other_cpu_share: float | None = Field(default=None, description="share of the CPU that others took while a timing ran, 0 to 1")
    measured_at: datetime

    @model_validator(mode="before")
    @classmethod
    def never_a_number_that_is_none(cls, data: object) -> object:
        """NaN and infinity become NULL with status ``not_finite``."""
        if isinstance(data, dict):
            for key in ("value", "standard_error"):
                number = data.get(key)
                if isinstance(number, float) and not math.isfinite(number):
                    data = {**data, key: None, **({"status": "not_finite"} if key == "value" else {})}
        return data

    @model_validator(mode="after")
    def a_value_or_a_reason(self) -> "Measurement":
        if (self.value is None) != (self.status in ("failed", "not_finite")):
            raise ValueError(f"{self.metric}: value {self.value} does not go with status {self.status!r}")
        return self


class Item(Spec):
    """One item of a suite (a token window, a prompt), so that comparisons can be paired."""

    artifact_digest: str
    protocol_digest: str
    suite: str
    item: int = Field(ge=0)
    metric: str
    value: float | None
    run: str
    base_digest: str | None = None


class BudgetRow(Spec):
    """A bound that an experiment declares for one variant; whether it holds is the view ``verdict``."""

    experiment: str
    variant: str
    metric: str
    at_most: float | None = None
    at_least: float | None = None
    blocks: bool = False
    recorded_at: datetime


class DeviceConstant(Spec):
    """What a device did in a measurement of nothing else: the constants that predicted times rest on. The latest of a grain counts."""

    device_digest: str
    constant: Literal["read_bandwidth", "copy_bandwidth", "matmul_rate", "launch_overhead"]
    dtype: str = Field(description="of the numbers that were read, copied or multiplied")
    size: str = Field(description="what one call worked on: 64 MiB, or rows x columns x depth of a product")
    amount: float = Field(gt=0, description="the same as a number: bytes or FLOPs of one call, 1 for a launch")
    value: float = Field(gt=0)
    unit: Literal["B/s", "FLOP/s", "s"]
    spread: float | None = Field(description="standard error of value, in unit; NULL of one repeat")
    threads: int = Field(ge=1)
    other_cpu_share: float | None = Field(default=None, description="share of the CPU that others took meanwhile, 0 to 1")
    status: Literal["ok", "noisy"] = "ok"
    source: Literal["measured", "datasheet"] = "measured"
    measured_at: datetime


TABLES: dict[str, type[Spec]] = {
    "experiment": ExperimentRow,
    "variant": VariantRow,
    "variant_axis": VariantAxisRow,
    "step": StepRow,
    "lineage": LineageRow,
    "protocol": ProtocolRow,
    "device": DeviceRow,
    "run": RunRow,
    "measurement": Measurement,
    "item": Item,
    "budget": BudgetRow,
    "device_constant": DeviceConstant,
}
