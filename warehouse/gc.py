"""Garbage collection: what no experiment reaches is shown, and then removed. Not here: which keys an experiment reaches.

Only the local directory is collected. A store on a URL may serve others, whose experiments are not known here; what is collected from its
cache is downloaded again when it is needed.
"""

import shutil
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from assay.warehouse.actions import Entry, kind_of
from assay.warehouse.errors import ArtifactMissingError
from assay.warehouse.files import size_of
from assay.warehouse.locks import hold, try_hold
from assay.warehouse.store import Store


@dataclass(frozen=True)
class Row:
    """One thing to remove. ``name`` is a key, a digest, or a name in quarantine; ``made_at`` is when it was made."""

    what: Literal["action", "artifact", "quarantine"]
    name: str
    kind: str
    size_bytes: int
    made_at: datetime
    why: str


@dataclass(frozen=True)
class Plan:
    """What :func:`collect` would remove from ``store``, the largest first."""

    store: Store = field(repr=False)
    rows: tuple[Row, ...]

    @property
    def size_bytes(self) -> int:
        return sum(row.size_bytes for row in self.rows)


def plan_gc(store: Store, reachable_keys: Set[str], keep_days: float = 0) -> Plan:
    """What can go: entries that are not reachable, artifacts that no kept entry names, and what lies in quarantine.

    An entry names its own artifact and those of its parents and data. Kept besides: what is younger than ``keep_days``, what a running
    build reads, and what has not been uploaded yet. Leftovers of killed processes are removed at once, since nothing can need them.

    Args:
        reachable_keys: the keys of every experiment that may run again.
        keep_days: days (24 h) since it was made, in which a thing is kept whatever reaches it.
    """
    store.sweep()
    cutoff = datetime.now(UTC) - timedelta(days=keep_days)
    entries = list(store.actions())
    goes = [entry for entry in entries if not _is_kept(store, entry, reachable_keys, cutoff)]
    gone = {entry.key for entry in goes}
    named = _named(store, [entry for entry in entries if entry.key not in gone])
    rows = [Row("action", each.key, kind_of(each.action, each.kind), 0, each.built_at, "no experiment reaches it") for each in goes]
    for digest in store.artifacts():
        kind, made_at = _describe(store, digest)
        if digest not in named and made_at <= cutoff:
            rows.append(Row("artifact", digest, kind, size_of(store.artifact_path(digest)), made_at, "no kept action names it"))
    for path in (store.root / "quarantine").iterdir():
        if (made_at := _changed_at(path)) <= cutoff:
            size = size_of(path) if path.is_dir() else path.stat().st_size
            rows.append(Row("quarantine", path.name, "damaged", size, made_at, "it was set aside as damaged"))
    return Plan(store, tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.what, row.name))))


def collect(plan: Plan, on_removed: Callable[[Row], None] | None = None) -> tuple[Row, ...]:
    """Remove the rows of ``plan`` that can still go, and return them.

    Safe while builds run: whether a row can go is decided again, in one short moment in which nothing else is published. An entry that
    was made again since the plan, an artifact that a new entry names or a running build reads, stays. A process that is killed here
    leaves each row whole or gone.
    """
    store = plan.store
    removed: list[Row] = []
    with store.workspace() as trash:
        with hold(store.lock_path("publish"), waiting_for="another process that publishes an artifact"):
            planned = {row.name: row.made_at for row in plan.rows if row.what == "action"}
            entries = {entry.key: entry for entry in store.actions()}
            goes = {key: entry for key, entry in entries.items() if planned.get(key) == entry.built_at}
            named = _named(store, [entry for key, entry in entries.items() if key not in goes])
            for row in sorted(plan.rows, key=lambda row: row.what):  # actions before artifacts: no entry is left without its artifact
                if row.what == "action":
                    if row.name not in goes:
                        continue
                    store.forget(goes[row.name])
                else:
                    source = store.artifact_path(row.name) if row.what == "artifact" else store.root / "quarantine" / row.name
                    if (row.what == "artifact" and row.name in named) or not source.exists():
                        continue
                    source.rename(trash / f"{row.what}-{row.name}")
                removed.append(row)
        for row in removed:
            if row.what != "action":
                shutil.rmtree(path) if (path := trash / f"{row.what}-{row.name}").is_dir() else path.unlink()
            if on_removed is not None:
                on_removed(row)
    _tidy(store)
    return tuple(removed)


def _is_kept(store: Store, entry: Entry, reachable_keys: Set[str], cutoff: datetime) -> bool:
    return entry.key in reachable_keys or entry.built_at > cutoff or (store.root / "unpushed" / entry.key).exists()


def _named(store: Store, entries: list[Entry]) -> set[str]:
    """Digests that these entries, and the work in progress, name."""
    named = store.in_use()
    for entry in entries:
        named |= {entry.digest, *entry.action.parents.values(), *entry.action.data.values()}
    return named


def _describe(store: Store, digest: str) -> tuple[str, datetime]:
    try:
        manifest = store.manifest(digest)
        return manifest.kind, manifest.built_at
    except ArtifactMissingError:  # damaged, so that its directory has to tell
        return "damaged", _changed_at(store.artifact_path(digest))


def _changed_at(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def _tidy(store: Store) -> None:
    """Remove the marks of entries that are gone, and the lock files of processes that were killed."""
    for marker in (store.root / "kinds").glob("*/*"):
        if not store.action_path(marker.name).exists():
            marker.unlink(missing_ok=True)
    for path in (store.root / "locks").glob("*.lock"):
        with try_hold(path):  # letting go of a lock removes its file
            pass
