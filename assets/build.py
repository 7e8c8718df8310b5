"""Builds what a ledger asks for, through the store: nodes, references, measurements. Heavy imports happen inside, on a miss only.

Parents are built first where they are missing, so that any one asset can be asked for by itself. Not here: Dagster, rows of facts.
"""

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.assets.ledger import Ledger, text_source
from assay.ops.steps.training import Running
from assay.schemas.graph import Node
from assay.schemas.manifest import Action
from assay.schemas.protocols import Divergence, Protocol
from assay.schemas.steps import DraftModel, Kv, TrainedStep, WeightStep
from assay.schemas.texts import Text
from assay.schemas.training import Distill
from assay.warehouse.store import Built

if TYPE_CHECKING:
    from assay.schemas.steps import Draft  # a new way to make a draft changes no key of those that there are

RUNTIME = "runtime.json"
RESULT = "result.json"
TOLD_EVERY = 20  # seconds between words about a training run
KEPT_DAYS = 14  # that the state of a training run which nobody went on with is kept


@dataclass(frozen=True)
class Builder:
    """Builds the nodes and measurements of one experiment. ``say`` is told how a long build goes, a line at a time."""

    ledger: Ledger
    say: Callable[[str], object] = lambda line: None

    def node(self, node: Node) -> Built:
        """The artifact of ``node``: a checkpoint, or for a runtime step the small file that says how one is run."""
        for parent in node.parents:
            if self.ledger.digest(parent) is None:
                self.node(parent)
        action = _asked(self.ledger.node(node), node)
        built = self.ledger.workspace.store.get_or_build(action, lambda out: self._make(node, out, action), kind=str(action.step["kind"]))
        if isinstance(node.step, DraftModel | TrainedStep):
            shutil.rmtree(self._training(action), ignore_errors=True)
        return built

    def _make(self, node: Node, out: Path, action: Action) -> dict[str, Any]:
        if node.base is not None:
            from assay.ops.apply import import_base

            return import_base(node.base, out)
        assert node.parent is not None and node.step is not None
        if isinstance(node.step, DraftModel):
            return self._draft_model(node.step, node, out, action)
        if not isinstance(node.step, WeightStep):
            return write_runtime(node.step, self._runtime(node.parent), self.ledger.digest(node.draft) if node.draft else None, out)
        parent = self._path(node.parent)
        if isinstance(node.step, TrainedStep):
            return self._trained(node.step, node, parent, out, action)
        from assay.ops.apply import apply

        windows = lambda calibration: self._windows(calibration.text, calibration.windows, calibration.length, parent)  # noqa: E731
        return apply(node.step, parent, out, windows=windows, seed=self.ledger.experiment.seed)

    def _draft_model(self, step: DraftModel, node: Node, out: Path, action: Action) -> dict[str, Any]:
        """A draft's model. Training keeps its state in the home, under the key of its action, so that a killed run goes on there."""
        assert node.parent is not None
        target, start = self._path(node.parent), self._path(node.draft) if node.draft else None
        if step.distill is None:
            from assay.ops.apply import early_exit_draft

            return early_exit_draft(step, target, out)
        from assay.ops.apply import train_draft

        return train_draft(step, target, start, out, windows=self._text_windows(target), running=self._running(node, action))

    def _trained(self, step: TrainedStep, node: Node, parent: Path, out: Path, action: Action) -> dict[str, Any]:
        """A model that is trained. What the base says of the text is kept in the store, for the other students that read it."""
        from assay.ops.apply import train

        base = self._path(node.root)
        windows, said = self._text_windows(base), None
        asked = self.ledger.teacher(node, step) if isinstance(step, Distill) else None
        if asked is not None:
            from assay.ops.steps.distill import teach

            said = self.ledger.workspace.store.get_or_build(asked, lambda out: teach(step, base, out, windows=windows), kind="teacher").path  # type: ignore[arg-type]
        return train(step, parent, out, windows=windows, teacher=base, said=said, running=self._running(node, action))

    def _text_windows(self, parent: Path) -> Callable[[Text, int, int], Any]:
        """(text, windows, length) → token ids, by the tokenizer of ``parent``."""
        return lambda text, windows, length: self._windows(text, windows, length, parent)

    def _running(self, node: Node, action: Action) -> Running:
        """Where a run keeps its state, what it is, and what tells how far it is."""
        state = self._training(action)
        _forget_old(state.parent)
        told = time.monotonic()

        def progress(at: Any) -> None:
            nonlocal told
            if time.monotonic() - told > TOLD_EVERY:
                told = time.monotonic()
                self.say(
                    f"{'/'.join(node.path)}: step {at.step:,} of {at.steps:,}, loss {at.loss:.4g}, {at.tokens_s:,.0f} tokens/s, "
                    f"{at.seconds_left / 60:.0f} min left"
                )

        return Running(self.ledger.experiment.seed, state, {"key": action.key}, progress)

    def _training(self, action: Action) -> Path:
        return self.ledger.workspace.home / "training" / action.key

    def _windows(self, text: Text, windows: int, length: int, parent: Path) -> Any:
        from assay.ops.data.texts import documents
        from assay.ops.data.tokens import calibration_windows
        from assay.ops.models.checkpoint import load_tokenizer

        found = documents(**text_source(text, self.ledger.experiment.file.parent))
        return calibration_windows(load_tokenizer(parent), found, windows, length)

    def reference(self, protocol: Divergence) -> Built:
        """The base's final hidden states on the protocol's text."""
        base = self.node(self.ledger.graph.base)

        def make(out: Path) -> dict[str, Any]:
            from assay.ops.suites.divergence import reference

            return reference(protocol, base.path, out, experiment_dir=self.ledger.experiment.file.parent)

        return self.ledger.workspace.store.get_or_build(
            _asked(self.ledger.reference(protocol), self.ledger.graph.base), make, kind="reference"
        )

    def measurement(self, node: Node, name: str, *, run: str, anew: bool = False) -> tuple[str, Built]:
        """The protocol ``name`` on what ends at ``node``, and the key of its action; ``anew`` measures a timing again although there is one."""
        protocol = self.ledger.experiment.protocols[name]
        self.node(node)
        reference = self.reference(protocol) if isinstance(protocol, Divergence) else None
        action = _asked(self.ledger.measurement(node, protocol, run=run if anew else None), node)

        def make(out: Path) -> dict[str, Any]:
            from assay.ops.measure import measure

            result = measure(protocol, self._subject(node, protocol), reference=reference.path if reference else None,
                             experiment_dir=self.ledger.experiment.file.parent)  # fmt: skip
            told = {"metrics": finite(result.metrics), "items": finite(result.items), "notes": result.notes, "run": run}
            (out / RESULT).write_text(json.dumps(told, allow_nan=False))
            for picture, data in result.pictures.items():
                (out / f"{picture}.png").write_bytes(data)
            return {"headline": headline(told["metrics"])}

        return action.key, self.ledger.workspace.store.get_or_build(action, make, kind=protocol.suite)

    def _subject(self, node: Node, protocol: Protocol) -> Any:
        from assay.ops.suites.subject import DraftOf, Subject

        runtime = self._runtime(node.target if isinstance(protocol, Divergence) else node)
        store, draft = self.ledger.workspace.store, None
        if runtime["draft"]:
            other = self._runtime_of(runtime["draft"]["digest"]) if runtime["draft"]["digest"] else None
            made = runtime["draft"].get("made", False)  # a model made for this target is run as its target is
            kv = runtime["kv"] if made else other["kv"] if other else None
            checkpoint = store.path(other["checkpoint"]) if other else None
            draft = DraftOf(runtime["draft"]["method"], runtime["draft"]["tokens"], runtime["draft"]["ngram"], checkpoint, kv,
                            runtime["draft"].get("adapt_cost"))  # fmt: skip
        base = self._path(self.ledger.graph.base)
        return Subject(checkpoint=store.path(runtime["checkpoint"]), kv_format=runtime["kv"], draft=draft, base=base)

    def _runtime(self, node: Node) -> dict[str, Any]:
        digest = self.ledger.digest(node)
        assert digest is not None, node.path
        return self._runtime_of(digest)

    def _runtime_of(self, digest: str) -> dict[str, Any]:
        file = self.ledger.workspace.store.path(digest) / RUNTIME
        return json.loads(file.read_text()) if file.is_file() else {"checkpoint": digest, "kv": None, "draft": None}

    def _path(self, node: Node) -> Path:
        digest = self.ledger.digest(node)
        assert digest is not None, node.path
        return self.ledger.workspace.store.path(digest)


def write_runtime(step: "Kv | Draft", before: dict[str, Any], draft: str | None, out: Path) -> dict[str, Any]:
    """Write how a checkpoint is run: its digest, the KV format, the draft and the digest of the draft's variant or model.

    Args:
        before: the same of the parent.
        draft: the digest of the variant that drafts, or of the model that was made for it (then ``made`` says so); None for an n-gram.
    """
    if isinstance(step, Kv):
        runtime = {**before, "kv": step.format}
    else:
        more = {"made": True} if step.made else {}
        more |= {} if step.adapt_cost is None else {"adapt_cost": step.adapt_cost}
        runtime = {**before, "draft": {"method": step.method, "tokens": step.tokens, "ngram": step.ngram, "digest": draft, **more}}
    (out / RUNTIME).write_text(json.dumps(runtime, indent=1, sort_keys=True))
    return {"runtime": runtime}


def _forget_old(states: Path) -> None:
    """Remove the states of training runs that nobody has gone on with: their experiment was changed, or given up."""
    for state in states.glob("*"):
        if time.time() - max((path.stat().st_mtime for path in state.glob("*")), default=state.stat().st_mtime) > KEPT_DAYS * 86_400:
            shutil.rmtree(state, ignore_errors=True)


def finite(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` with every number that is not finite as None, and the status that says so."""
    bad = [{key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)} for row in rows]
    return [
        {**row, **dict.fromkeys(keys), **({"status": "not_finite"} if "value" in keys else {})} for row, keys in zip(rows, bad, strict=True)
    ]


def headline(metrics: list[dict[str, Any]]) -> dict[str, float | None]:
    """The metrics over everything, without slices."""
    return {each["metric"]: each["value"] for each in metrics if each.get("slice_kind", "all") == "all"}


def _asked(action: Action | None, node: Node) -> Action:
    if action is None:
        raise RuntimeError(f"a parent of {'/'.join(node.path)} left the store while it was being built; run again")
    return action
