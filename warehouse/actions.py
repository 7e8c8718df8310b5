"""The entry of an action in the cache, and what distinguishes two actions, in words. Not here: where entries are kept (``store.py``)."""

import json
import re
from datetime import datetime
from typing import Any

from pydantic import Field

from assay.schemas.manifest import Action
from assay.schemas.spec import Spec

_DIGEST = re.compile(r"[0-9a-f]{40,}")


class Entry(Spec):
    """What is known of a key: the action, and what came out. ``kind`` is the artifact's; ``seconds`` is what the build took."""

    key: str
    action: Action
    kind: str
    digest: str
    summary: dict[str, Any] = {}
    seconds: float = Field(ge=0)
    built_at: datetime


def kind_of(action: Action, kind: str) -> str:
    """The kind of step that an action is, by which earlier ones are found; of an action whose step has none, the artifact's ``kind``."""
    named = action.step.get("kind")
    return named if isinstance(named, str) and named else kind


def difference(before: Action, after: Action) -> list[str]:
    """What changed, one phrase each, in the order of the action's fields: ``step.group_size 64 → 32``, ``code changed``.

    Digests are only said to have changed.
    """
    old, new = _leaves(before.model_dump(mode="json")), _leaves(after.model_dump(mode="json"))
    phrases = []
    for path in [*old, *(path for path in new if path not in old)]:
        if path not in new or path not in old:
            value, verb = (old[path], "removed") if path in old else (new[path], "added")
            if value not in ({}, []):  # its items are phrases of their own
                phrases.append(f"{path} {verb}" + ("" if _is_digest(value) else f": {_shown(value)}"))
        elif (type(old[path]), old[path]) != (type(new[path]), new[path]):
            digests = _is_digest(old[path]) and _is_digest(new[path])
            phrases.append(f"{path} changed" if digests else f"{path} {_shown(old[path])} → {_shown(new[path])}")
    return phrases


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted path → scalar. An empty list or object is a leaf."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if not items:
        return {path: value}
    leaves: dict[str, Any] = {}
    for name, inner in items:
        leaves |= _leaves(inner, f"{path}.{name}" if path else str(name))
    return leaves


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
