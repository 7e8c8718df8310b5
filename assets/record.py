"""From what was built to rows of facts, each file under a name that its content gives: writing again replaces, so nothing is lost or doubled.

Not here: the files (``warehouse/facts.py``) or what is read from them (``warehouse/views``).
"""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from assay.assets.build import RESULT
from assay.assets.ledger import Ledger
from assay.schemas.experiment import Variant, empty_option
from assay.schemas.facts import (
    BudgetRow,
    ExperimentRow,
    Item,
    LineageRow,
    Measurement,
    ProtocolRow,
    RunRow,
    StepRow,
    VariantAxisRow,
    VariantRow,
)
from assay.schemas.graph import Node
from assay.schemas.metrics import TIMED_SUITES
from assay.schemas.protocols import Protocol
from assay.schemas.spec import canonical_json, digest_of
from assay.warehouse.devices import device_row
from assay.warehouse.locks import hold


class Recorder:
    """Writes the facts of one experiment; everything is told by name, so that telling it twice changes nothing."""

    def __init__(self, ledger: Ledger):
        self.ledger, self.facts, self.store = ledger, ledger.workspace.facts, ledger.workspace.store

    def declare(self) -> None:
        """That the experiment exists, with the variants that it has now, and its protocols."""
        experiment, now = self.ledger.experiment, _now()
        spec = {
            "question": experiment.question, "base": experiment.base.model_dump(mode="json"),
            "axes": {axis: list(options) for axis, options in experiment.axes.items()},
        }  # fmt: skip
        digests = {name: digest_of(protocol) for name, protocol in experiment.protocols.items()}
        row = ExperimentRow(experiment=experiment.name, question=experiment.question, axes=list(experiment.axes), variants=[v.slug for v in experiment.variants],
                            spec_json=canonical_json(spec), declared_at=now, protocols=list(digests.values()))  # fmt: skip
        for name, protocol in experiment.protocols.items():
            told = ProtocolRow(protocol_digest=digests[name], name=name, suite=protocol.suite, spec_json=canonical_json(protocol))
            self._once("protocol", f"{name}_{digests[name][:16]}", [told])
        budgets = [
            BudgetRow(experiment=experiment.name, variant=variant.slug, metric=budget.metric, at_most=budget.at_most, at_least=budget.at_least,
                      blocks=budget.blocks, recorded_at=now)
            for variant in experiment.variants for budget in experiment.budgets_of(variant)
        ]  # fmt: skip
        # Together: budgets count from the declaration that they came with, and another step may be declaring at this moment.
        with hold(self.ledger.workspace.home / "locks" / f"declare-{experiment.name}.lock"):
            self.facts.append("experiment", [row], name=experiment.name)
            self.facts.append("budget", budgets, name=experiment.name)

    def run(self, run: str, trigger: str) -> None:
        self._once("run", run, [RunRow(run=run, started_at=_now(), experiment=self.ledger.experiment.name, trigger=trigger)])  # type: ignore[arg-type]

    def node(self, node: Node) -> None:
        """The step that made an artifact, and its parents."""
        digest = self._digest(node)
        manifest = self.store.manifest(digest)
        action = self.ledger.node(node)
        assert action is not None
        step = StepRow(artifact_digest=digest, key=action.key, kind=str(action.step["kind"]), spec_json=canonical_json(action.step), code_fingerprint=action.code,
                       size_bytes=manifest.size_bytes, build_seconds=manifest.build_seconds, built_at=manifest.built_at,
                       summary_json=canonical_json(manifest.summary))  # fmt: skip
        self._once("step", f"{digest[:32]}_{action.key[:16]}_told", [step])  # files without the end are of a time when no summary was kept
        parents = [
            LineageRow(artifact_digest=digest, parent_digest=parent, role=role if role in ("draft", "teacher") else "parent")
            for role, parent in action.parents.items()
        ]
        if parents:
            self._once("lineage", digest, parents)

    def variants(self, variants: Iterable[Variant]) -> None:
        """What variants have come to, with the time: a file for each set of artifacts that they ever were, so that history stays."""
        now, rows, axes = _now(), [], []
        for variant in variants:
            node = self.ledger.graph.ends[variant.slug]
            spec = canonical_json([step.model_dump(mode="json") for step in variant.steps])
            rows.append(VariantRow(experiment=variant.experiment, variant=variant.slug, base=self.ledger.experiment.base.name, artifact_digest=self._digest(node),
                                   target_digest=self._digest(node.target), checkpoint_digest=self._digest(node.checkpoint), spec_json=spec, recorded_at=now))  # fmt: skip
            axes += [
                VariantAxisRow(experiment=variant.experiment, variant=variant.slug, axis=axis, option=option)
                for axis, option in variant.options or self._without_steps()
            ]
        experiment = self.ledger.experiment.name
        if rows:
            self.facts.append("variant", rows, name=f"{experiment}-{digest_of([[row.variant, row.artifact_digest] for row in rows])[:24]}")
        if axes:
            self._once("variant_axis", f"{experiment}-{digest_of([axis.model_dump() for axis in axes])[:24]}", axes)

    def measurement(self, node: Node, name: str, key: str, digest: str) -> list[Measurement]:
        """The facts of a measured artifact, in files called by the ``key`` of the action: two actions may come to one artifact."""
        protocol = self.ledger.experiment.protocols[name]
        manifest = self.store.manifest(digest)
        result = json.loads((self.store.path(digest) / RESULT).read_text())
        common = self._common(node, protocol, result["run"], manifest.built_at)
        rows = [Measurement.model_validate({**common, **metric}) for metric in result["metrics"]]
        if protocol.suite in TIMED_SUITES:
            self._once("device", device_row().device_digest, [device_row()])
        items = [
            Item(
                artifact_digest=common["artifact_digest"],
                protocol_digest=common["protocol_digest"],
                suite=protocol.suite,
                run=result["run"],
                base_digest=common["base_digest"] if protocol.suite == "divergence" else None,
                **item,
            )
            for item in result["items"]
        ]
        if items:
            self._once("item", key, items)
        self._once("measurement", key, rows)
        return rows

    def failure(self, node: Node, name: str, run: str, error: BaseException) -> None:
        """That a suite failed on a variant: a row without a value, so that the gap has a reason. Never cached: the next run tries again."""
        protocol = self.ledger.experiment.protocols[name]
        row = Measurement.model_validate({
            **self._common(node, protocol, run, _now()), "metric": protocol.suite, "value": None, "unit": "", "n": 0, "status": "failed",
            "message": "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])[:2000],
        })  # fmt: skip
        self.facts.append("measurement", [row], name=f"failed-{digest_of([row.artifact_digest, row.protocol_digest])[:32]}-{run}")

    def _common(self, node: Node, protocol: Protocol, run: str, when: datetime) -> dict[str, Any]:
        subject = node.target if protocol.suite == "divergence" else node
        timed = {"device_digest": device_row().device_digest} if protocol.suite in TIMED_SUITES else {}
        return {"artifact_digest": self._digest(subject), "base_digest": self._digest(self.ledger.graph.base), "protocol_digest": digest_of(protocol),
                "suite": protocol.suite, "seed": getattr(protocol, "seed", 0), "run": run, "measured_at": when, **timed}  # fmt: skip

    def _without_steps(self) -> list[tuple[str, str]]:
        """The base where it is no grid point, as a place on the axes: the empty option of each that has one."""
        axes = self.ledger.experiment.axes
        return [(axis, empty_option(options)) for axis, options in axes.items() if not all(options.values())]

    def _digest(self, node: Node) -> str:
        digest = self.ledger.digest(node)
        assert digest is not None, node.path
        return digest

    def _once(self, table: str, name: str, rows: list[Any]) -> None:
        if not self.facts.exists(table, name):
            self.facts.append(table, rows, name=name)


def _now() -> datetime:
    return datetime.now(UTC)
