"""Which keys of the store an experiment reaches. Not here: removing the others (``warehouse/gc.py``)."""

from collections.abc import Iterator

from assay.assets.ledger import Ledger
from assay.assets.measurements import measured
from assay.schemas.manifest import Action
from assay.schemas.protocols import Divergence


def reachable(ledger: Ledger) -> Iterator[str]:
    """The key of every node, reference and measurement whose parents are in the store."""
    graph, experiment = ledger.graph, ledger.experiment
    asked: list[Action | None] = [ledger.node(node) for node in graph.nodes]
    asked += [ledger.reference(protocol) for protocol in experiment.protocols.values() if isinstance(protocol, Divergence)]
    asked += [
        ledger.measurement(graph.ends[v.slug], experiment.protocols[name]) for v in experiment.variants for name in measured(graph, v)
    ]
    yield from (action.key for action in asked if action is not None)
