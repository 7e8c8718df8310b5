"""An experiment: a base, axes of named options, a grid over them, what is measured, and the bounds that it should keep.

Here is what the YAML may say (:class:`ExperimentFile`) and what it comes to once names are resolved (:class:`Experiment`, :class:`Variant`).
Not here: reading the YAML and judging it (``schemas/load.py``), the graph of steps (``schemas/graph.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Union, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, create_model, model_validator

from assay.schemas.base import Base, Source
from assay.schemas.protocols import Protocol
from assay.schemas.spec import BaseName, Name, Spec
from assay.schemas.steps import Draft, Step

LARGEST_GRID = 5_000

# A name or something longer: told apart before either is tried, so that an error speaks of the form that was meant.
NAME, OTHER = "<name>", "<other>"
NameOrOther = Discriminator(lambda value: NAME if isinstance(value, str) else OTHER)

Choice = Annotated[Annotated[Name, Tag(NAME)] | Annotated[Annotated[list[Name], Field(min_length=1)], Tag(OTHER)], NameOrOther]
Options = Annotated[dict[Name, Choice], Field(description="axis: option, or axis: [option, option]")]
Steps = Annotated[list[Step], Field(max_length=16, description="[{kind: ...}, ...], in order; [] is the option that does nothing")]


def _with_a_name(protocol: type[Spec]) -> type[Spec]:
    """``protocol`` as it is written into an experiment, where it may have a name."""
    return create_model(f"Inline{protocol.__name__}", __base__=protocol, __doc__=protocol.__doc__, name=(Name | None, None))


if TYPE_CHECKING:
    InlineProtocol = Protocol
else:
    InlineProtocol = Annotated[Union[tuple(map(_with_a_name, get_args(get_args(Protocol)[0])))], Field(discriminator="suite")]  # noqa: UP007


def named(protocol: InlineProtocol) -> tuple[str, Protocol]:
    """What a protocol is called here, its suite by default, and the protocol itself: its name is no part of how it measures."""
    return getattr(protocol, "name", None) or protocol.suite, TypeAdapter(Protocol).validate_python(protocol.model_dump(exclude={"name"}))


class Grid(Spec):
    """Which combinations: those that some ``include`` pattern allows and no ``exclude`` pattern does. A pattern leaves free the axes it does not name."""

    include: list[Options] | None = Field(
        default=None, max_length=200, description="patterns; a variant needs one of them; all, if it is left out"
    )
    exclude: list[Options] = Field(default=[], max_length=200, description="patterns; a variant may have none of them")


class Budget(Spec):
    """A bound on one metric of the variants that ``for`` selects (all, if it is left out)."""

    model_config = ConfigDict(validate_by_name=False, validate_by_alias=True)

    metric: str = Field(description="for example kl_mean_nats")
    at_most: float | None = None
    at_least: float | None = None
    where: Options = Field(
        default={}, alias="for", description="the variants that it holds for, as axis: option, or axis: [option, option]"
    )
    blocks: bool = Field(default=False, description="a breach fails the run and stops what depends on it; otherwise it is a warning")

    @model_validator(mode="after")
    def a_bound(self) -> "Budget":
        if (self.at_most is None) == (self.at_least is None):
            given = "neither" if self.at_most is None else "both"
            raise ValueError(f"a budget has one of at_most and at_least; got {given}")
        return self


class Resources(Spec):
    """What a step of this experiment needs; translated to every executor's own words."""

    gpu: int = Field(default=0, ge=0, le=64)
    memory: str | None = Field(default=None, pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$", description="a number and Mi, Gi or Ti, for example 80Gi")
    priority: int = Field(default=0, ge=-100, le=100)


class ExperimentFile(Spec):
    """A base, axes of named options, the grid over them, what is measured, and the bounds that it should keep."""

    name: Name = Field(description="also the name of its view in SQL")
    question: str = Field(default="", max_length=2000, description="what this experiment is to answer")
    base: Annotated[Annotated[BaseName, Tag(NAME)] | Annotated[Source, Tag(OTHER)], NameOrOther] = Field(
        description="a name from assets/bases.yaml, or {hub, revision}, or {path}"
    )
    axes: dict[Name, Annotated[dict[Name, Steps], Field(description="option: [steps]")]] = Field(
        min_length=1, max_length=32, description="axis: {option: [steps]}; the axes become SQL columns"
    )
    grid: Annotated[Annotated[Literal["all"], Tag(NAME)] | Annotated[Grid, Tag(OTHER)], NameOrOther] = Field(
        default="all", description="all is the product of the axes; {include: [...], exclude: [...]} keeps some of it"
    )
    measure: list[Annotated[Annotated[Name, Tag(NAME)] | Annotated[InlineProtocol, Tag(OTHER)], NameOrOther]] = Field(
        min_length=1, max_length=64, description="names from assets/protocols.yaml, or protocols written out as {suite: ...}"
    )
    budgets: list[Budget] = Field(default=[], max_length=1000, description="bounds on metrics, checked after each run")
    seed: int = Field(default=0, ge=0, lt=2**31)
    max_variants: int = Field(default=500, ge=1, le=LARGEST_GRID, description="a larger grid is refused")
    resources: Resources = Resources()


@dataclass(frozen=True)
class Variant:
    """A grid point: its option on each axis, and the steps that these spell."""

    experiment: str
    options: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]

    @cached_property
    def slug(self) -> str:
        """The option names in axis order; ``base`` for the base where it is no grid point."""
        return "__".join(option for _, option in self.options) or "base"

    @property
    def draft(self) -> Draft | None:
        last = self.steps[-1] if self.steps else None
        return last if isinstance(last, Draft) else None


@dataclass(frozen=True)
class Experiment:
    """An experiment that has been judged possible: names are resolved, every variant's order of steps is right."""

    name: str
    question: str
    base: Base
    axes: Mapping[str, Mapping[str, tuple[Step, ...]]]
    points: tuple[tuple[str, ...], ...]
    protocols: Mapping[str, Protocol]
    budgets: tuple[Budget, ...]
    seed: int
    resources: Resources
    file: Path
    draft_bases: Mapping[str, Base]

    def variant(self, options: Mapping[str, str]) -> Variant:
        """The variant at ``options``, in the grid or not; an axis left out takes its first option without steps."""
        chosen = tuple((axis, options.get(axis) or empty_option(self.axes[axis])) for axis in self.axes)
        return Variant(self.name, chosen, tuple(step for axis, option in chosen for step in self.axes[axis][option]))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Every variant that is measured, the base first (as a grid point where it is one)."""
        found = [self.variant(dict(zip(self.axes, point, strict=True))) for point in self.points]
        bare = [variant for variant in found if not variant.steps]
        return (*(bare or [Variant(self.name, (), ())]), *(variant for variant in found if variant.steps))

    def budgets_of(self, variant: Variant) -> list[Budget]:
        return [budget for budget in self.budgets if matches(budget.where, dict(variant.options))]


def empty_option(options: Mapping[str, tuple[Step, ...]]) -> str:
    """The first option of an axis that has no steps.

    Raises:
        KeyError: every option has steps.
    """
    for name, steps in options.items():
        if not steps:
            return name
    raise KeyError("no option without steps")


def matches(pattern: Options, options: Mapping[str, str]) -> bool:
    """Whether ``options`` has, on every axis that ``pattern`` names, that option or one of those options."""
    return all(options.get(axis) in ([wanted] if isinstance(wanted, str) else wanted) for axis, wanted in pattern.items())


def allowed(pattern: Options, axes: Mapping[str, Mapping[str, object]]) -> list[list[str]]:
    """The options that ``pattern`` allows on each axis: all of them where it names none. Their product is the points that match it."""
    return [
        [option for option in options if axis not in pattern or matches({axis: pattern[axis]}, {axis: option})]
        for axis, options in axes.items()
    ]
