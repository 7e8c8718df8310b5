"""Which text a step or a protocol reads, and how much of it a step looks at. Not here: reading it (``ops/data``)."""

from pydantic import Field, model_validator

from assay.schemas.spec import Commit, HubId, Name, Spec


class Text(Spec):
    """Tokens of a text: a packaged corpus by name, a local file (.txt, or .jsonl with a ``text`` field), or a parquet file of a hub data set."""

    name: Name | None = Field(default=None, description="a packaged text: wikipedia, wikipedia_train, essays, mathematics, python_code")
    path: str | None = Field(default=None, description="a .txt or .jsonl file; relative to the experiment file")
    hub: HubId | None = Field(default=None, description="a hub data set, org/name, with revision, file and column")
    revision: Commit | None = Field(default=None, description="a commit of 40 hexadecimal digits")
    file: str | None = Field(default=None, description="a parquet file of the hub data set")
    column: str = "text"

    @model_validator(mode="after")
    def one_source(self) -> "Text":
        given = [key for key in ("name", "path", "hub") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"a text has one of name, path, hub; got {' and '.join(given) or 'none of them'}")
        if self.hub and not (self.revision and self.file):
            raise ValueError("a hub text needs revision (a 40-digit commit) and file (a parquet file of the data set)")
        return self


class Calibration(Spec):
    """The text that a step looks at: ``windows`` windows of ``length`` tokens."""

    text: Text = Text(name="wikipedia_train")
    windows: int = Field(default=16, ge=1, le=4096)
    length: int = Field(default=512, ge=16, le=131_072, description="tokens in a window")
