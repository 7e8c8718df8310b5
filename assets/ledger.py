"""What is asked for each node and measurement of an experiment, and what the store has of it. Reads JSON only: no torch, nothing is built.

An :class:`Action` can be written down once the digests of its parents are known, so a ledger answers None for what stands behind a gap.
"""

from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from assay.assets.workspace import Workspace
from assay.ops.apply import maker
from assay.ops.data.texts import text_digest
from assay.ops.tasks.packaged import task_functions, tasks_digest
from assay.schemas.base import Base
from assay.schemas.graph import Graph, Node
from assay.schemas.manifest import Action
from assay.schemas.metrics import TIMED_SUITES
from assay.schemas.protocols import Choice, Divergence, Generation, LmEval, Protocol
from assay.schemas.spec import digest_of
from assay.schemas.steps import Draft, DraftModel, TrainedStep, WeightStep, rounding_of
from assay.schemas.texts import Text
from assay.schemas.training import Distill
from assay.warehouse.devices import device_digest
from assay.warehouse.fingerprint import fingerprint
from assay.warehouse.versions import numerics_versions

OF_THE_DRAFT = ("variant", "base", "early_exit", "distill")  # what of a draft step says which model drafts


class Ledger:
    """The actions of one experiment's graph against one store."""

    def __init__(self, workspace: Workspace, graph: Graph):
        self.workspace, self.graph, self.experiment = workspace, graph, graph.experiment
        self._digests: dict[tuple[str, ...], str] = {}

    def digest(self, node: Node) -> str | None:
        """What ``node`` came to, if it and all before it are in the store."""
        if node.path not in self._digests:
            action = self.node(node)
            found = self.has(action) if action else None
            if found is None:
                return None
            self._digests[node.path] = found
        return self._digests[node.path]

    def has(self, action: Action) -> str | None:
        """The digest that ``action`` came to, if its artifact is in the store and whole."""
        hit = self.workspace.store.hit(action)
        return hit.digest if hit else None

    def node(self, node: Node) -> Action | None:
        """The action that builds ``node``; None while a parent is missing."""
        if node.base is not None:
            return Action(step={"kind": "base", **_source(node.base)}, code=_code(f"import_{_kind(node.base)}_base"), versions=_versions())
        assert node.parent is not None and node.step is not None
        parents = {"parent": self.digest(node.parent), **({"draft": self.digest(node.draft)} if node.draft else {})}
        if isinstance(node.step, Distill):
            parents["teacher"] = self.digest(node.root)
        if None in parents.values():
            return None
        known = {role: digest for role, digest in parents.items() if digest}
        step = node.step.model_dump(mode="json")
        if isinstance(node.step, DraftModel):
            return self._draft_model(node.step, step, known)
        if not isinstance(node.step, WeightStep):
            if isinstance(node.step, Draft):
                unsaid = (*OF_THE_DRAFT, *(("adapt_cost",) if node.step.adapt_cost is None else ()))
                step = {key: value for key, value in step.items() if key not in unsaid}  # the draft's digest says which
                step |= {"made": True} if node.step.made else {}
            return Action(step=step, code=code("assay.assets.build:write_runtime"), parents=known)
        if isinstance(node.step, TrainedStep):
            data = self.texts(node.step)
        else:
            calibration = getattr(node.step, "calibration", None)
            data = {"calibration": self.text(calibration.text)} if calibration else {}
        more = ("compressed-tensors",) if rounding_of(node.step) else ()
        if isinstance(node.step, Distill) and node.step.lora:
            more = ("peft",)
        return Action(
            step=step, code=code(maker(node.step)), parents=known, data=data, seed=self.experiment.seed, versions=_versions(*more)
        )

    def _draft_model(self, step: DraftModel, told: dict[str, Any], parents: dict[str, str]) -> Action:
        """A model that is cut out of its target needs no text, no seed and no training code."""
        if step.distill is None:
            return Action(step=told, code=_code(maker_of(step)), parents=parents, versions=_versions())
        more = ("compressed-tensors",) if step.distill.quantize else ()
        data = {"text": self.text(step.distill.text)}
        return Action(
            step=told, code=_code(maker_of(step)), parents=parents, data=data, seed=self.experiment.seed, versions=_versions(*more)
        )

    def teacher(self, node: Node, step: Distill) -> Action | None:
        """What the base says of the text that ``step`` reads, kept for every run that reads it; None where it is run beside the student."""
        base = self.digest(node.root)
        if base is None or step.teacher == "model":
            return None
        from assay.ops.steps.distill import asked_of_teacher

        data = self.texts(step)
        return Action(
            step=asked_of_teacher(step),
            code=code("assay.ops.steps.distill:teach"),
            parents={"teacher": base},
            data=data,
            versions=_versions(),
        )

    def reference(self, protocol: Divergence) -> Action | None:
        """The base's final hidden states on the text of ``protocol``."""
        base = self.digest(self.graph.base)
        if base is None:
            return None
        step = {"kind": "reference", **protocol.model_dump(mode="json")}
        return Action(
            step=step,
            code=measuring_code("reference"),
            parents={"base": base},
            data={"text": self.text(protocol.text)},
            versions=_versions(),
        )

    def measurement(self, node: Node, protocol: Protocol, *, run: str | None = None) -> Action | None:
        """``protocol`` on what ends at ``node``. A timing belongs to this device; with ``run`` it is asked anew."""
        subject = node.target if isinstance(protocol, Divergence) else node
        parents = {"subject": self.digest(subject), "base": self.digest(self.graph.base)}
        if isinstance(protocol, Divergence):
            reference = self.reference(protocol)
            parents["reference"] = self.has(reference) if reference else None
        if None in parents.values():
            return None
        data = {}
        if protocol.suite in TIMED_SUITES:
            data = {"device": device_digest(), **({"run": run} if run else {})}
        for name in ("text", "haystack"):
            text = getattr(protocol, name, None)
            if text is not None:
                data[name] = self.text(text)
        data |= self.tasks(protocol)
        return Action(step=protocol.model_dump(mode="json"), code=measuring_code(protocol.suite), parents={k: v for k, v in parents.items() if v}, data=data,
                      seed=getattr(protocol, "seed", 0), versions=_versions())  # fmt: skip

    def tasks(self, protocol: Protocol) -> dict[str, str]:
        """Of a protocol that asks tasks: their files and data, and the code that the files name, which no import shows."""
        if isinstance(protocol, LmEval):
            include = self.experiment.file.parent / Path(protocol.include).expanduser() if protocol.include else None
            return {"tasks": tasks_digest(include=include)}
        if not isinstance(protocol, Choice | Generation):
            return {}
        return {"tasks": tasks_digest(protocol.tasks), "task_code": digest_of([code(each) for each in task_functions(protocol.tasks)])}

    def texts(self, step: TrainedStep) -> dict[str, str]:
        """The digests of what a step that trains reads: its text, or each of its domains."""
        domains = getattr(step, "domains", None) or ()
        return {f"domain_{number}": self.text(domain.text) for number, domain in enumerate(domains)} or {"text": self.text(step.text)}

    def text(self, text: Text) -> str:
        return text_digest(**text_source(text, self.experiment.file.parent))


def text_source(text: Text, directory: Path) -> dict[str, Any]:
    """The arguments by which ``ops/data/texts.py`` reads ``text``; local files are relative to ``directory``."""
    return {**text.model_dump(exclude_none=True, exclude_defaults=True), **({"directory": directory} if text.path else {})}


def code_of(node: Node) -> str:
    """The code fingerprint of what builds ``node``, for Dagster's code version."""
    if node.base is not None:
        return _code(f"import_{_kind(node.base)}_base")
    assert node.step is not None
    if isinstance(node.step, DraftModel):
        return _code(maker_of(node.step))
    return code(maker(node.step)) if isinstance(node.step, WeightStep) else code("assay.assets.build:write_runtime")


def maker_of(step: DraftModel) -> str:
    """The function of ``ops/apply.py`` that makes a draft's model."""
    return "train_draft" if step.distill else "early_exit_draft"


def _code(function: str) -> str:
    return code(f"assay.ops.apply:{function}")


_MODULE = {"reference": "divergence"}  # beside the suite that it is for


def measuring_code(suite: str) -> str:
    """The code fingerprint of what measures ``suite``."""
    return code(f"assay.ops.suites.{_MODULE.get(suite, suite)}:{suite}")


@cache
def code(entry: str) -> str:
    """The fingerprint of ``entry`` as the source was when this process first asked: code that it has loaded is never called by a later one."""
    return fingerprint(entry)


_versions = cache(numerics_versions)


def _kind(base: Base) -> str:
    return "hub" if base.hub else "path" if base.path else "package"


def _source(base: Base) -> dict[str, Any]:
    """What a base is, by content: a hub commit, the bytes of a directory's files, the recorded hash of a packaged file."""
    if base.hub:
        return {"hub": base.hub, "revision": base.revision, "dtype": base.dtype}
    if base.package:
        files = distribution(base.package.name).files or []
        recorded = [str(file.hash.value) for file in files if file.hash and str(file).endswith(base.package.file)]
        return {"package": base.package.model_dump(), "sha256": recorded, "dtype": base.dtype}
    assert base.path is not None
    return {"files": file_digests(Path(base.path)), "dtype": base.dtype}


def file_digests(path: Path) -> dict[str, str]:
    """sha256 of a GGUF file, or of every file that the checkpoint in a directory is read from, by name."""
    wanted = (
        [path] if path.is_file() else sorted(file for kind in ("*.safetensors", "*.json", "*.model", "*.txt") for file in path.glob(kind))
    )
    return {file.name: _sha256(file, file.stat().st_size, file.stat().st_mtime_ns) for file in wanted}


@cache
def _sha256(file: Path, size: int, changed: int) -> str:
    from hashlib import file_digest

    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
