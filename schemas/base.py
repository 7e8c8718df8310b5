"""Where a base model comes from. Not here: opening one (``ops/models``)."""

from typing import Literal, Self

from pydantic import Field, model_validator

from assay.schemas.spec import BaseName, Commit, HubId, Spec


class Shape(Spec):
    """The widths that steps are checked against before anything is loaded."""

    layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    tied: bool


class Packaged(Spec):
    """A file inside an installed package."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$", description="the distribution, as pip names it")
    version: str
    file: str = Field(description="path inside the distribution's files, or the last part of it")


class Source(Spec):
    """Where a model's files are: a hub id and its revision, a local directory, or a file inside an installed package."""

    hub: HubId | None = Field(default=None, description="a hub id, org/name; needs revision")
    revision: Commit | None = Field(default=None, description="a commit of 40 hexadecimal digits; a branch would move")
    path: str | None = Field(default=None, description="a directory with a Hugging Face checkpoint; relative to the experiment file")
    package: Packaged | None = None
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="what its weights are saved as, once")

    @model_validator(mode="after")
    def one_source(self) -> Self:
        given = [key for key in ("hub", "path", "package") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"a base has one of hub, path, package; got {' and '.join(given) or 'none of them'}")
        if self.hub and not self.revision:
            raise ValueError("a hub base needs revision: the commit that is meant, 40 hexadecimal digits (a branch would move)")
        if self.revision and not self.hub:
            raise ValueError(f"revision is for hub; got it with {given[0]}")
        return self


class Base(Source):
    """A model to start from, by name."""

    name: BaseName
    shape: Shape | None = Field(
        default=None, description="stated for a packaged file, whose own header is slow to read; checked when it is opened"
    )
    licence: str | None = None
    note: str | None = None
