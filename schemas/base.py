"""Where a base model comes from. Not here: opening one (``ops/models``)."""

from typing import Literal

from pydantic import Field, model_validator

from assay.schemas.spec import BaseName, Spec


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


class Base(Spec):
    """A model to start from: a hub id and revision, a local directory, or a file inside an installed package."""

    name: BaseName
    hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$", description="a 40-digit commit; a branch would move")
    path: str | None = None
    package: Packaged | None = None
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="what its weights are saved as, once")
    shape: Shape | None = Field(
        default=None, description="stated for a packaged file, whose own header is slow to read; checked when it is opened"
    )
    licence: str | None = None
    note: str | None = None

    @model_validator(mode="after")
    def one_source(self) -> "Base":
        given = [key for key in ("hub", "path", "package") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"a base has one of hub, path, package; got {' and '.join(given) or 'none of them'}")
        if self.hub and not self.revision:
            raise ValueError("a hub base needs revision: the 40-digit commit that is meant")
        return self
