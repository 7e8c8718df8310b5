"""The ground that every spec stands on: frozen, closed models and the names they may use. Not here: any particular spec."""

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

# A name becomes a Dagster key, an SQL value and a part of a path: lower case, no double underscore (keys are joined by one).
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(_[a-z0-9]+)*$", max_length=48)]

# A base keeps the spelling that its makers gave it: also dots and dashes.
BaseName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$", max_length=96)]


HubId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", max_length=200)]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]  # a branch or a tag would move
Dtype = Literal["float32", "bfloat16"]  # of the arithmetic of a measurement
Values = TypeVar("Values", bound=tuple[float | str, ...])


class Spec(BaseModel):
    """Immutable and closed: a misspelt field is an error, never a default; NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


def canonical_json(value: Any) -> str:
    """The one JSON text of ``value``: keys sorted, no spaces, no NaN; specs are dumped with their defaults, so that these count."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of(value: Any) -> str:
    """The sha256 (hex) of :func:`canonical_json`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def once(values: Values) -> Values:
    """``values``, refused where there is none or one is there twice, as a slice is called."""
    if not values:
        raise ValueError("got an empty list; expected at least one value")
    told = [value if isinstance(value, str) else f"{value:g}" for value in values]
    twice = next((each for each in told if told.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is there twice; expected each value once")
    return values


Each = TypeVar("Each")
Distinct = Annotated[tuple[Each, ...], AfterValidator(once)]  # each value once
